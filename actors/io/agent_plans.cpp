#include <string>
#include <utility>

#include "troupe/io/agent_core.hpp"

// Lists of places, and the transfers made from two lists.

namespace troupe::io {

namespace {

constexpr std::size_t max_plans = 65'536;

unexpected in_entry(std::size_t index, const troupe::error& why) {
  return fail(why.code, "entry " + std::to_string(index) + ": " + why.message);
}

unexpected nobody_holds(std::size_t index, const entry& what, const std::string& whose) {
  return fail(errc::unknown_region,
              "entry " + std::to_string(index) + ": no memory of " + whose + " holds address " +
                  std::to_string(what.address) + " and " + std::to_string(what.count) + " x " +
                  std::to_string(what.length) + " bytes from there; register the memory first");
}

/// The length from the first byte to the last. May wrap; later checks reject entries that do.
std::uint64_t rough_hull(const entry& what) {
  if (what.count <= 1) return what.length;
  return (std::uint64_t{what.count} - 1) * what.stride + what.length;
}

result<plan_id> put_plan(auto& plans, std::uint64_t& last, auto made) {
  if (plans.size() >= max_plans) {
    return fail(errc::overloaded,
                std::to_string(plans.size()) + " plans are prepared, the most; release some first");
  }
  plans.emplace(++last, std::move(made));
  return plan_id{last};
}

}  // namespace

result<plan_id> agent_core::prepare(std::span<const piece> local) {
  auto made = std::make_shared<prepared_list>();
  const lock_type lock{mutex_};
  for (std::size_t i = 0; i < local.size(); ++i) {
    const auto& one = local[i];
    const auto* found = memories_.find(one.of);
    if (found == nullptr || found->withdrawn) {
      return fail(errc::not_found, "piece " + std::to_string(i) + ": there is no memory " +
                                       std::to_string(one.of.value));
    }
    if (one.offset > found->what.length()) {
      return fail(errc::out_of_range, "piece " + std::to_string(i) + ": offset " +
                                          std::to_string(one.offset) + " in a memory of " +
                                          std::to_string(found->what.length()) + " bytes");
    }
    const entry at{found->what.address() + one.offset, one.length, one.stride, one.count};
    if (auto ok = add_entry(made->places, found->what, at); !ok) return in_entry(i, ok.error());
  }
  return put_plan(plans_, last_id_, std::move(made));
}

result<plan_id> agent_core::prepare(std::span<const entry> local) {
  auto made = std::make_shared<prepared_list>();
  const lock_type lock{mutex_};
  for (std::size_t i = 0; i < local.size(); ++i) {
    const auto* found = memories_.find_at(local[i].address, rough_hull(local[i]));
    if (found == nullptr) return nobody_holds(i, local[i], "this agent");
    if (auto ok = add_entry(made->places, found->what, local[i]); !ok) {
      return in_entry(i, ok.error());
    }
  }
  return put_plan(plans_, last_id_, std::move(made));
}

result<plan_id> agent_core::prepare(peer_id who, std::span<const entry> remote) {
  auto made = std::make_shared<prepared_list>();
  made->who = who;
  const lock_type lock{mutex_};
  const auto found = find_peer(who);
  if (!found) return fail(found.error());
  const auto& of = **found;
  for (std::size_t i = 0; i < remote.size(); ++i) {
    const auto number = of.by_address.find(remote[i].address, rough_hull(remote[i]));
    if (!number) return nobody_holds(i, remote[i], "agent '" + of.known.name + "'");
    if (auto ok = add_entry(made->places, of.memories.at(*number), remote[i]); !ok) {
      return in_entry(i, ok.error());
    }
  }
  return put_plan(plans_, last_id_, std::move(made));
}

result<plan_id> agent_core::session(memory_id local, peer_id who, std::uint64_t remote) {
  auto made = std::make_shared<prepared_list>();
  made->who = who;
  const lock_type lock{mutex_};
  const auto* own = memories_.find(local);
  if (own == nullptr || own->withdrawn) {
    return fail(errc::not_found, "there is no memory " + std::to_string(local.value));
  }
  const auto found = find_peer(who);
  if (!found) return fail(found.error());
  const auto there = (*found)->memories.find(remote);
  if (there == (*found)->memories.end()) {
    return fail(errc::not_found, "agent '" + (*found)->known.name + "' has described no memory " +
                                     std::to_string(remote));
  }
  made->session.emplace(own->what, there->second);
  return put_plan(plans_, last_id_, std::move(made));
}

result<void> agent_core::release(plan_id which) {
  const lock_type lock{mutex_};
  if (plans_.erase(which.value) != 0) return {};
  return fail(errc::not_found, "there is no plan " + std::to_string(which.value));
}

result<std::shared_ptr<const agent_core::prepared_list>> agent_core::find_plan(
    plan_id which) const {
  const auto at = plans_.find(which.value);
  if (at != plans_.end()) return at->second;
  return fail(errc::not_found, "there is no plan " + std::to_string(which.value) +
                                   "; it was never prepared, or was released");
}

// -- transfers

result<transfer_handle> agent_core::make(transport::direction dir, plan_id local,
                                         std::span<const std::uint32_t> local_index, plan_id remote,
                                         std::span<const std::uint32_t> remote_index,
                                         merge_entries merge) {
  std::shared_ptr<const prepared_list> here;
  std::shared_ptr<const prepared_list> there;
  {
    const lock_type lock{mutex_};
    const auto one = find_plan(local);
    if (!one) return fail(one.error());
    const auto other = find_plan(remote);
    if (!other) return fail(other.error());
    here = *one;
    there = *other;
  }
  if (here->session || there->session || here->who.value != 0 || there->who.value == 0) {
    return fail(errc::invalid_config,
                "a transfer is made of a plan of this agent's memory and one of a peer's, in this "
                "order; a session goes with `move`");
  }
  auto moves = pair_up(here->places, local_index, there->places, remote_index, merge);
  if (!moves) return fail(std::move(moves).error());
  return add_transfer(dir, there->who, std::move(*moves));
}

result<transfer_handle> agent_core::move(transport::direction dir, plan_id over,
                                         std::span<const segment> segments,
                                         std::span<const std::byte> note_bytes,
                                         std::chrono::milliseconds deadline) {
  std::shared_ptr<const prepared_list> with;
  {
    const lock_type lock{mutex_};
    const auto found = find_plan(over);
    if (!found) return fail(found.error());
    with = *found;
  }
  if (!with->session) {
    return fail(errc::invalid_config, "plan " + std::to_string(over.value) + " is not a session");
  }
  const auto& [own, theirs] = *with->session;
  placed_list here;
  placed_list there;
  for (std::size_t i = 0; i < segments.size(); ++i) {
    const auto& one = segments[i];
    if (one.local_offset > own.length() || one.remote_offset > theirs.length()) {
      return fail(errc::out_of_range,
                  "segment " + std::to_string(i) + " begins behind the end of a memory");
    }
    const entry from{own.address() + one.local_offset, one.length, one.local_stride, one.count};
    const entry to{theirs.address() + one.remote_offset, one.length, one.remote_stride, one.count};
    if (auto ok = add_entry(here, own, from); !ok) return in_entry(i, ok.error());
    if (auto ok = add_entry(there, theirs, to); !ok) return in_entry(i, ok.error());
  }
  auto moves = pair_up(here, {}, there, {}, merge_entries::yes);
  if (!moves) return fail(std::move(moves).error());
  auto made = add_transfer(dir, with->who, std::move(*moves));
  if (!made) return made;
  if (auto ok = post(*made, note_bytes, deadline); !ok) {
    static_cast<void>(release(*made));
    return fail(std::move(ok).error());
  }
  return made;
}

result<transfer_handle> agent_core::add_transfer(transport::direction dir, peer_id who,
                                                 planned_batch moves) {
  if (dir != transport::direction::write && dir != transport::direction::read) {
    return fail(errc::invalid_config, "a transfer writes or reads");
  }
  const auto wanted =
      dir == transport::direction::write ? transport::access::write : transport::access::read;
  const lock_type lock{mutex_};
  const auto found = find_peer(who);
  if (!found) return fail(found.error());
  for (const auto number : moves.remote_memories) {
    const auto at = (*found)->memories.find(number);
    if (at == (*found)->memories.end() || transport::permits(at->second.rights, wanted)) continue;
    return fail(errc::unauthorized,
                "memory " + std::to_string(number) + " of agent '" + (*found)->known.name +
                    (wanted == transport::access::write ? "' is not for peers to write"
                                                        : "' is not for peers to read"));
  }
  if (transfers_.size() >= options_.max_transfers) {
    return fail(errc::overloaded, std::to_string(transfers_.size()) +
                                      " transfers are kept, the most; release some that have "
                                      "ended");
  }
  auto made = std::make_shared<agent_transfer>();
  made->id = transfer_handle{++last_id_};
  made->dir = dir;
  made->who = who;
  made->moves = std::make_shared<const planned_batch>(std::move(moves));
  transfers_.emplace(last_id_, made);
  return made->id;
}

}  // namespace troupe::io
