#include "troupe/transport/grant_table.hpp"

#include <algorithm>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "troupe/kvcache/or_undo.hpp"
#include "troupe/transport/random.hpp"

namespace troupe::transport {

bool revocable::revoke() noexcept {
  const bool first = !revoked_.exchange(true, std::memory_order_seq_cst);
  // A pin lasts one non-blocking system call: microseconds. Yield, since its holder may have been
  // preempted on this very core.
  for (int round = 0; pins_.load(std::memory_order_seq_cst) != 0; ++round) {
    if (round > 64) std::this_thread::yield();
  }
  return first;
}

void given_grant::keep(const remote_grant& drawn, region_use used) {
  id = drawn.id;
  transfer = drawn.transfer;
  standing = drawn.standing;
  rights = drawn.rights;
  permitted = drawn.permitted;
  base = used->data();
  region_size = used->size();
  region = used->id();
  gpu = used->gpu();
  memory = std::move(used);
}

result<void> given_grant::check_use(access wanted, transfer_id for_transfer) const {
  if (!serves(for_transfer)) {
    return fail(errc::unauthorized, "the grant was given for another transfer");
  }
  if (!permits(rights, wanted)) {
    return fail(errc::unauthorized, wanted == access::read ? "the grant does not permit reading"
                                                           : "the grant does not permit writing");
  }
  return {};
}

result<void> given_grant::check_place(const extent& range) const {
  if (auto ok = check_range(range, region_size); !ok) return ok;
  if (!permitted.covers(range)) {
    return fail(errc::out_of_range, std::to_string(range.count) + " x " +
                                        std::to_string(range.length) + " bytes at offset " +
                                        std::to_string(range.offset) +
                                        " are not within what the grant permits");
  }
  return {};
}

result<remote_grant> draw_grant(const region& memory, const byte_set& permitted, access rights,
                                const grant_scope& scope, incarnation self) {
  if (permitted.is_listed() && permitted.extents().empty()) {
    return fail(errc::out_of_range, "a grant names at least one extent");
  }
  if (auto ok = permitted.check_within(memory.size()); !ok) {
    return fail(ok.error().code,
                "region " + std::to_string(memory.id().value) + ", " + ok.error().message);
  }
  return remote_grant{.id = random_id(),
                      .region = memory.id(),
                      .owner = self,
                      .transfer = scope.transfer,
                      .standing = scope.standing,
                      .rights = rights,
                      .region_size = memory.size(),
                      .permitted = permitted,
                      .key = {}};
}

result<remote_grant> grant_table::give(region_use memory, const byte_set& permitted, access rights,
                                       const grant_scope& scope) {
  auto said = draw_grant(*memory, permitted, rights, scope, self_);
  if (!said) return said;
  auto given = std::make_shared<given_grant>();
  given->keep(*said, std::move(memory));
  const std::unique_lock lock{mutex_};
  if (grants_.size() >= max_grants_) {
    return fail(errc::overloaded,
                std::to_string(grants_.size()) +
                    " grants are open on this link, the maximum; fence transfers");
  }
  const auto place = by_transfer_.emplace(scope.transfer, given->id);
  or_undo([&] { grants_.emplace(said->id, std::move(given)); }, [&] { by_transfer_.erase(place); });
  return said;
}

std::shared_ptr<given_grant> grant_table::find(std::uint64_t id) const {
  const std::shared_lock lock{mutex_};
  const auto at = grants_.find(id);
  return at == grants_.end() ? nullptr : at->second;
}

std::size_t grant_table::revoke(transfer_id transfer) {
  std::vector<std::shared_ptr<given_grant>> ended;
  {
    const std::shared_lock lock{mutex_};
    const auto [first, last] = by_transfer_.equal_range(transfer);
    for (auto at = first; at != last; ++at) ended.push_back(grants_.at(at->second));
  }
  return end(ended);
}

std::size_t grant_table::revoke_all() {
  std::vector<std::shared_ptr<given_grant>> ended;
  {
    const std::shared_lock lock{mutex_};
    for (const auto& [id, given] : grants_) ended.push_back(given);
  }
  return end(ended);
}

// A grant stays in the table until its pins are gone, so that two concurrent fences both wait.
std::size_t grant_table::end(const std::vector<std::shared_ptr<given_grant>>& ended) {
  std::size_t count = 0;
  for (const auto& given : ended) count += given->guard.revoke() ? 1U : 0U;
  const std::unique_lock lock{mutex_};
  for (const auto& given : ended) {
    if (grants_.erase(given->id) == 0) continue;
    const auto [first, last] = by_transfer_.equal_range(given->transfer);
    by_transfer_.erase(
        std::find_if(first, last, [&](const auto& entry) { return entry.second == given->id; }));
    given->memory.release();
  }
  return count;
}

void grant_table::add_users_of(region_id region, std::set<transfer_id>& to) const {
  const std::shared_lock lock{mutex_};
  for (const auto& [id, given] : grants_) {
    if (given->region == region) to.insert(given->transfer);
  }
}

std::size_t grant_table::size() const {
  const std::shared_lock lock{mutex_};
  return grants_.size();
}

}  // namespace troupe::transport
