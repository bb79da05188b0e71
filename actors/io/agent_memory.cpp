#include <algorithm>
#include <string>
#include <utility>

#include "troupe/io/agent_core.hpp"
#include "troupe/kvcache/or_error.hpp"

// Memory: registration, descriptors, deregistration.

namespace troupe::io {

namespace {

unexpected no_memory(memory_id of) {
  return fail(errc::not_found, "there is no memory " + std::to_string(of.value) +
                                   "; it was never registered, or was deregistered");
}

}  // namespace

result<memory_id> agent_core::register_memory(std::span<std::byte> bytes, std::string name,
                                              transport::access rights) {
  if (bytes.data() == nullptr || bytes.empty()) {
    return fail(errc::invalid_config,
                "memory '" + name + "': the memory to register is null or empty");
  }
  const auto address = reinterpret_cast<std::uintptr_t>(bytes.data());
  if (address > UINTPTR_MAX - bytes.size()) {
    return fail(errc::invalid_config, "memory '" + name + "': " + std::to_string(bytes.size()) +
                                          " bytes at address " + std::to_string(address) +
                                          " end behind the last address; register memory that is "
                                          "there");
  }
  return add_memory(bytes, std::move(name), rights);
}

result<memory_id> agent_core::add_memory(std::span<std::byte> bytes, std::string name,
                                         transport::access rights) {
  if (!access_from(static_cast<std::uint8_t>(rights))) {
    return fail(errc::invalid_config, "memory '" + name + "': peers read it, write it, or both");
  }
  const std::lock_guard one_at_a_time{registering_};
  std::vector<region_id> made;
  auto added = or_error("memory is registered",
                        [&] { return add_with_regions(bytes, std::move(name), rights, made); });
  if (!added) forget_regions(made);
  return added;
}

/// Called without the lock. `made` receives the regions that were made for the memory, on failure,
/// too.
result<memory_id> agent_core::add_with_regions(std::span<std::byte> bytes, std::string name,
                                               transport::access rights,
                                               std::vector<region_id>& made) {
  while (true) {
    lock_type lock{mutex_};
    const auto gaps = memories_.gaps_in(bytes);
    if (gaps.empty()) return memories_.add(bytes, std::move(name), rights);
    lock.unlock();  // registering may take long
    made.reserve(made.size() + gaps.size());
    for (const auto& gap : gaps) {
      auto* const at =
          bytes.data() + (gap.address - reinterpret_cast<std::uintptr_t>(bytes.data()));
      auto region = place_->register_memory({at, gap.length}, name);
      if (!region) return fail(std::move(region).error());
      made.push_back(*region);
      lock.lock();
      memories_.add_region(*region, gap);
      lock.unlock();
    }
  }
}

void agent_core::forget_regions(std::span<const region_id> those) {
  for (const auto region : those) {
    const lock_type lock{mutex_};
    memories_.remove_region(region);
  }
  for (const auto region : those) static_cast<void>(place_->deregister(region));
}

result<memory_id> agent_core::allocate(std::uint64_t size, std::string name,
                                       transport::access rights) {
  const auto region = place_->allocate(size, name);
  if (!region) return fail(region.error());
  auto added = or_error("memory is allocated", [&]() -> result<memory_id> {
    const auto span = place_->bytes(*region);
    if (!span) return fail(span.error());
    {
      const lock_type lock{mutex_};
      memories_.add_region(*region, {reinterpret_cast<std::uintptr_t>(span->data()), span->size()});
    }
    return add_memory(*span, std::move(name), rights);
  });
  if (!added) forget_regions({&*region, 1});
  return added;
}

result<std::span<std::byte>> agent_core::bytes(memory_id of) const {
  const lock_type lock{mutex_};
  const auto* found = memories_.find(of);
  if (found == nullptr) return no_memory(of);
  return std::span{found->base, found->what.length()};
}

// -- deregistration

result<void> agent_core::deregister(memory_id of, std::chrono::milliseconds wait) {
  const auto until = std::chrono::steady_clock::now() + bounded(wait);
  lock_type lock{mutex_};
  auto* found = memories_.find(of);
  if (found == nullptr) return no_memory(of);
  memories_.withdraw(of);
  std::vector<revocation> those;
  for (const auto& [number, one] : links_) {
    if (one.of->guest_link != number) continue;
    const auto given = one.of->given.find(of.value);
    if (given == one.of->given.end()) continue;
    for (const auto& grant : given->second) those.push_back({number, one.wire, grant, of});
  }
  begin_revoking(those);
  for (const auto& [number, one] : links_) {
    if (one.of->guest_link == number) one.of->given.erase(of.value);
  }
  lock.unlock();
  revoke(those);
  lock.lock();
  std::vector<transfer_ptr> users;
  for (const auto& [run, one] : runs_) {
    if (std::ranges::binary_search(one->moves->local_memories, of.value)) users.push_back(one);
  }
  for (const auto& one : users) {
    stop(lock, one, {errc::aborted, "a memory that it moves was deregistered"}, false);
  }
  const bool at_rest = wait_until(lock, until, [&] {
    const auto* now = memories_.find(of);
    if (now == nullptr) return true;
    const auto uses = [&](const auto& one) {
      return std::ranges::binary_search(one.second->moves->local_memories, of.value);
    };
    const auto revokes = [&](const auto& one) { return one.second == of; };
    return now->busy == 0 && std::ranges::none_of(runs_, uses) &&
           std::ranges::none_of(revoking_, revokes);
  });
  if (!at_rest) {
    return fail(errc::deadline, "memory " + std::to_string(of.value) +
                                    " is withdrawn, but a peer or a transfer may still touch it; "
                                    "call again before you free it");
  }
  if (memories_.find(of) == nullptr) return {};  // another thread deregistered it meanwhile
  const auto leaving = memories_.let_leave(of);
  lock.unlock();
  for (const auto region : leaving) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        until - std::chrono::steady_clock::now());
    auto gone = place_->withdraw(region, std::max(left, std::chrono::milliseconds{0}));
    if (!gone && gone.error().code != errc::unknown_region) return gone;
  }
  lock.lock();
  memories_.remove(of);
  wake_waiters();
  return {};
}

void agent_core::begin_revoking(const std::vector<revocation>& those) {
  for (const auto& one : those) {
    revoking_.emplace(std::pair{one.link, one.grant.transfer.value}, one.of);
  }
}

void agent_core::revoke(const std::vector<revocation>& those) {
  for (const auto& one : those) revoke(one.link, one.wire, one.grant);
}

void agent_core::revoke(std::uint64_t link, const link_ptr& wire,
                        const transport::remote_grant& grant) {
  if (wire && wire->revoke(grant) != transport::fence_state::quiescent) return;
  const lock_type lock{mutex_};
  revoking_.erase({link, grant.transfer.value});
  wake_waiters();  // `deregister` may be waiting for it
}

// -- descriptors

descriptor agent_core::own_descriptor() const {
  descriptor self;
  self.life = life_;
  self.token = token_;
  self.port = port_;
  self.host = options_.host;
  self.name = options_.name;
  return self;
}

result<std::vector<std::byte>> agent_core::describe(std::span<const memory_id> only) const {
  auto self = own_descriptor();
  {
    const lock_type lock{mutex_};
    const auto all = memories_.all();
    for (const auto of : only.empty() ? std::span<const memory_id>{all} : only) {
      const auto* found = memories_.find(of);
      if (found == nullptr) return no_memory(of);
      if (!found->withdrawn) self.memories.push_back(found->what);
    }
  }
  auto described = self.encode();
  if (described.size() > max_descriptor_size) {
    return fail(errc::overloaded, "the descriptor of " + std::to_string(self.memories.size()) +
                                      " memories has " + std::to_string(described.size()) +
                                      " bytes, the most is " + std::to_string(max_descriptor_size) +
                                      "; describe some of them at a time");
  }
  return described;
}

}  // namespace troupe::io
