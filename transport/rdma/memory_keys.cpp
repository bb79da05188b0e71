#include "troupe/transport/rdma/memory_keys.hpp"

#include <algorithm>
#include <cerrno>
#include <string>
#include <utility>

#include <sys/resource.h>

#include "troupe/transport/os_error.hpp"

namespace troupe::transport::rdma {

namespace {

/// The most pieces of one region: 64 GiB in pieces of 16 MiB.
constexpr std::uint64_t max_pieces = 4096;
constexpr std::uint64_t page = 4096;
/// A window lies within one piece, and some devices bind no window of more than 2 GiB.
constexpr std::uint64_t window_bytes = std::uint64_t{1} << 30;

std::uint64_t piece_for(const std::vector<std::shared_ptr<device>>& rails, std::uint64_t wanted) {
  auto most = wanted == 0 ? UINT64_MAX : wanted;
  for (const auto& rail : rails) {
    if (rail->limits().max_mr_size != 0) most = std::min(most, rail->limits().max_mr_size);
  }
  return std::max(page, most / page * page);
}

}  // namespace

registrar registrar::of_the_library() {
  return {.by_address = [](ibv_pd* domain, void* address, std::size_t bytes,
                           int rights) { return ::ibv_reg_mr(domain, address, bytes, rights); },
          .by_dmabuf =
              [](ibv_pd* domain, std::uint64_t offset, std::size_t bytes, std::uint64_t address,
                 int dmabuf, int rights) {
                return ::ibv_reg_dmabuf_mr(domain, offset, bytes, address, dmabuf, rights);
              }};
}

memory_keys::memory_keys(std::vector<std::shared_ptr<device>> rails, registration_options options)
    : rails_{std::move(rails)},
      options_{std::move(options)},
      piece_bytes_{piece_for(rails_, options_.max_piece)} {
  if (!options_.relaxed_ordering) return;
  // Try it with a scratch page, so that the answer is known from the start.
  for (std::size_t rail = 0; rail < rails_.size(); ++rail) {
    alignas(page) std::array<std::byte, page> any{};
    refusal why;
    auto* made = register_piece(
        rail, {.data = any.data(), .bytes = any.size(), .rights = IBV_ACCESS_LOCAL_WRITE}, why);
    if (made != nullptr) ::ibv_dereg_mr(made);
  }
}

std::string memory_keys::ordering() const {
  if (!options_.relaxed_ordering) return "strict ordering (relaxed_ordering: off)";
  std::string refused;
  for (std::size_t i = 0; i < rails_.size(); ++i) {
    const int why = strict_[i].load(std::memory_order_relaxed);
    if (why == 0) continue;
    refused += (refused.empty() ? "" : ", ") + rails_[i]->name() + " (" + what_errno(why) + ")";
  }
  return refused.empty() ? "relaxed ordering"
                         : "strict ordering: relaxed was refused by " + refused;
}

/// Registers the piece as a dma-buf if it is one and the device accepts it, otherwise by its
/// address.
ibv_mr* memory_keys::try_both(const device& rail, const wanted_piece& piece, int more_rights,
                              refusal& why) const {
  const int rights = piece.rights | more_rights;
  if (piece.dmabuf >= 0) {
    auto* made = options_.calls.by_dmabuf(rail.domain(), piece.offset, piece.bytes,
                                          reinterpret_cast<std::uintptr_t>(piece.data),
                                          piece.dmabuf, rights);
    if (made != nullptr) return made;
    why.by_dmabuf = errno;
  }
  auto* made = options_.calls.by_address(rail.domain(), piece.data, piece.bytes, rights);
  if (made == nullptr) why.by_address = errno;
  return made;
}

/// Registers with relaxed ordering if wanted and accepted. Null on failure, with the reason in
/// `why`.
ibv_mr* memory_keys::register_piece(std::size_t rail, const wanted_piece& piece,
                                    refusal& why) const {
  const auto& on = *rails_[rail];
  auto& strict = strict_[rail];
  if (options_.relaxed_ordering && strict.load(std::memory_order_relaxed) == 0) {
    if (auto* made = try_both(on, piece, IBV_ACCESS_RELAXED_ORDERING, why)) return made;
    const int said = why.by_address != 0 ? why.by_address : EINVAL;
    auto* made = try_both(on, piece, 0, why);
    int never = 0;
    // The refusal of a dma-buf says nothing about other memory.
    if (made != nullptr && piece.dmabuf < 0 &&
        strict.compare_exchange_strong(never, said, std::memory_order_relaxed) && options_.notice) {
      options_.notice("RDMA device " + on.name() + " refused to register memory with relaxed " +
                      "ordering (" + what_errno(said) + "); it is registered without");
    }
    return made;
  }
  return try_both(on, piece, 0, why);
}

unexpected memory_keys::refused(const region& memory, const device& by, reach wanted,
                                const refusal& why) const {
  auto sentence = "region " + std::to_string(memory.id().value) + " '" + memory.name() + "' of " +
                  std::to_string(memory.size()) + " bytes cannot be registered with " + by.name() +
                  ": ";
  if (why.by_dmabuf >= 0) {
    sentence += "as a dma-buf: " + what_errno(why.by_dmabuf) +
                (wanted == reach::windows ? " (perhaps only because of memory windows, see "
                                            "memory_windows)"
                                          : "") +
                "; by its address: ";
  }
  sentence += what_errno(why.by_address);
  rlimit limit{};
  if (why.by_address == ENOMEM && ::getrlimit(RLIMIT_MEMLOCK, &limit) == 0 &&
      limit.rlim_cur != RLIM_INFINITY) {
    sentence += "; this process may lock " + std::to_string(limit.rlim_cur) +
                " bytes (ulimit -l), raise it";
  }
  return fail(errc::pool_exhausted, std::move(sentence));
}

result<std::unique_ptr<const registered_region>> memory_keys::register_with_all(
    const region& memory, reach by) const {
  const int rights = by == reach::windows ? IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND
                                          : IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE |
                                                IBV_ACCESS_REMOTE_READ;
  const auto piece_bytes =
      by == reach::windows ? std::min(piece_bytes_, window_bytes) : piece_bytes_;
  const auto pieces = memory.size() / piece_bytes + (memory.size() % piece_bytes != 0 ? 1 : 0);
  if (pieces > max_pieces) {
    return fail(errc::out_of_range, "region " + std::to_string(memory.id().value) + " of " +
                                        std::to_string(memory.size()) + " bytes would be " +
                                        std::to_string(pieces) + " registrations of " +
                                        std::to_string(piece_bytes) + " bytes, at most " +
                                        std::to_string(max_pieces) + " are made; make it smaller");
  }
  auto made = std::make_unique<registered_region>(memory, piece_bytes);
  made->pieces_.resize(pieces);
  for (std::size_t i = 0; i < pieces; ++i) {
    auto& piece = made->pieces_[i];
    const auto offset = i * piece_bytes;
    const auto bytes = std::min(piece_bytes, memory.size() - offset);
    for (std::size_t rail = 0; rail < rails_.size(); ++rail) {
      auto& one = piece.registered[rail];
      refusal why;
      one.reset(register_piece(rail,
                               {.data = memory.data() + offset,
                                .bytes = bytes,
                                .dmabuf = memory.dmabuf(),
                                .offset = memory.dmabuf_offset() + offset,
                                .rights = rights},
                               why));
      if (!one) return refused(memory, *rails_[rail], by, why);
      piece.local[rail] = one->lkey;
    }
  }
  return std::unique_ptr<const registered_region>{std::move(made)};
}

result<const registered_region*> memory_keys::of(const region& memory, reach by) {
  std::shared_ptr<entry> found;
  {
    const std::lock_guard lock{mutex_};
    auto& at = entries_[memory.id()];
    if (!at) at = std::make_shared<entry>();
    found = at;
  }
  result<std::unique_ptr<const registered_region>> made = nullptr;
  {
    const std::lock_guard lock{found->mutex};
    auto& here = found->made[static_cast<std::size_t>(by)];
    if (!here) {
      made = register_with_all(memory, by);
      if (made) here = std::move(*made);
    }
    if (here) return here.get();
  }
  drop_if_empty(memory.id(), std::move(found));
  return fail(std::move(made).error());
}

/// Drops the entry unless another caller is still using it: of several that fail, the last drops
/// it.
void memory_keys::drop_if_empty(region_id region, std::shared_ptr<entry> failed) {
  const std::lock_guard lock{mutex_};
  const auto at = entries_.find(region);
  if (at == entries_.end() || at->second != failed) return;
  failed.reset();
  if (at->second.use_count() > 1) return;
  if (!at->second->made[0] && !at->second->made[1]) entries_.erase(at);
}

void memory_keys::forget(region_id region) {
  std::shared_ptr<entry> gone;  // deregistered without the lock
  const std::lock_guard lock{mutex_};
  const auto at = entries_.find(region);
  if (at == entries_.end()) return;
  gone = std::move(at->second);
  entries_.erase(at);
}

std::size_t memory_keys::size() const {
  const std::lock_guard lock{mutex_};
  return entries_.size();
}

}  // namespace troupe::transport::rdma
