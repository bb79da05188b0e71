#include <cstring>
#include <string>
#include <utility>

#include "troupe/io/agent_core.hpp"
#include "troupe/kvcache/or_error.hpp"

// Transfers between memories of this agent: copies on the caller's thread.

namespace troupe::io {

/// The memories that the transfer uses, from this agent's own table: our descriptor may have been
/// altered before it came back to us, and no link checks these copies.
result<std::vector<own_memory*>> agent_core::own_memories_of(const agent_transfer& which) {
  const auto& moves = *which.moves;
  std::vector<own_memory*> used;
  for (const auto* numbers : {&moves.local_memories, &moves.remote_memories}) {
    for (const auto number : *numbers) {
      auto* own = memories_.find(memory_id{number});
      if (own == nullptr || own->withdrawn) {
        return fail(errc::grant_revoked, "memory " + std::to_string(number) + " was deregistered");
      }
      used.push_back(own);
    }
  }
  const auto wanted =
      which.dir == transport::direction::write ? transport::access::write : transport::access::read;
  for (const auto& group : moves.groups) {
    const auto& what = memories_.find(memory_id{group.remote_memory})->what;
    if (!transport::permits(what.rights, wanted)) {
      return fail(errc::unauthorized, "memory " + std::to_string(what.number) +
                                          " was registered with other rights than the descriptor "
                                          "says");
    }
    if (auto ok = check_within(group, what); !ok) return fail(std::move(ok).error());
  }
  return used;
}

/// Releases the lock meanwhile.
void agent_core::copy_within(lock_type& lock, const transfer_ptr& which) {
  const auto moves = which->moves;
  const auto used = own_memories_of(*which);
  if (!used) {
    finish(which, used.error(), 0, moves->all_entries());
    return;
  }
  for (auto* own : *used) ++own->busy;
  which->at = agent_transfer::stage::posted;
  lock.unlock();
  auto copied = or_error("bytes are copied", [&] { return copy_groups(*moves, which->dir); });
  lock.lock();
  for (auto* own : *used) --own->busy;
  if (copied && which->has_note) {
    copied = or_error("a notice is kept", [&] {
      if (const auto self = find_peer(which->who)) put_own_note(**self, which->note);
    });
  }
  finish(which, copied ? std::nullopt : std::optional{copied.error()}, copied ? moves->bytes : 0,
         copied ? std::vector<std::uint32_t>{} : moves->all_entries());
}

/// Called without the lock.
result<void> agent_core::copy_groups(const planned_batch& moves, transport::direction dir) const {
  for (const auto& group : moves.groups) {
    for (const auto region : {group.local, group.remote}) {
      if (!place_->gpu_of(region)) continue;
      return fail(errc::backend_unavailable,
                  "region " + std::to_string(region.value) +
                      " is memory of a GPU, which an agent does not move to itself; use the "
                      "GPU's own copies");
    }
    const auto here = place_->bytes(group.local);
    if (!here) return fail(here.error());
    const auto there = place_->bytes(group.remote);
    if (!there) return fail(there.error());
    for (const auto& one : group.segments) {
      for (std::uint32_t i = 0; i < one.count; ++i) {
        auto* const local = here->data() + one.local_offset + i * one.local_stride;
        auto* const remote = there->data() + one.remote_offset + i * one.remote_stride;
        const bool writes = dir == transport::direction::write;
        std::memmove(writes ? remote : local, writes ? local : remote, one.length);
      }
    }
  }
  return {};
}

}  // namespace troupe::io
