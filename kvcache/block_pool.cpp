#include "troupe/kvcache/block_pool.hpp"

#include <algorithm>
#include <new>
#include <string>
#include <utility>

#include "troupe/kvcache/or_undo.hpp"

namespace troupe::kvcache {

// -- construction

block_pool::block_pool(std::uint32_t blocks, std::uint32_t max_waiters)
    : blocks_(blocks), max_waiters_{max_waiters} {
  counters_.total = counters_.free = blocks;
  list_free_runs();
}

// -- allocation

result<allocation> block_pool::allocate(std::uint32_t count) {
  if (unlisted_) list_free_runs();
  if (count > 0 && (!waiters_.empty() || count > counters_.free)) {
    ++counters_.refused;
    return fail(exhausted(count));
  }
  return take(count);
}

error block_pool::exhausted(std::uint32_t count) const {
  std::string text = "pool: " + std::to_string(count) + " blocks wanted, " +
                     std::to_string(counters_.free) + " of " + std::to_string(counters_.total) +
                     " free";
  if (counters_.quarantined > 0) {
    text += ", " + std::to_string(counters_.quarantined) + " in quarantine";
  }
  if (!waiters_.empty()) {
    text += ", " + std::to_string(waiters_.size()) + " requests waiting before";
  }
  text += count > counters_.total ? "; the pool never has that many, make it larger"
                                  : "; wait for blocks, or make the pool larger";
  return {errc::pool_exhausted, std::move(text)};
}

allocation block_pool::take(std::uint32_t count) {
  allocation taken;
  taken.owner = block_owner{next_owner_++};
  taken.blocks.reserve(count);
  ++counters_.allocations;
  while (taken.blocks.size() < count) {
    const auto wanted = count - static_cast<std::uint32_t>(taken.blocks.size());
    // The smallest run that holds all wanted blocks; else the largest run, to need few runs.
    auto best = runs_by_length_.lower_bound({wanted, 0});
    if (best == runs_by_length_.end()) --best;
    const auto [length, start] = *best;
    take_run(start, length, std::min(length, wanted), taken);
  }
  counters_.free -= count;
  counters_.allocated += count;
  return taken;
}

void block_pool::take_run(std::uint32_t start, std::uint32_t length, std::uint32_t count,
                          allocation& into) {
  auto run = free_runs_.extract(start);
  auto by_length = runs_by_length_.extract({length, start});
  if (count < length) {
    // Reuses the nodes of the run, so that running out of memory cannot lose the rest of it.
    run.key() = start + count;
    run.mapped() = length - count;
    by_length.value() = {length - count, start + count};
    free_runs_.insert(std::move(run));
    runs_by_length_.insert(std::move(by_length));
  }
  for (std::uint32_t id = start; id < start + count; ++id) {
    blocks_[id] = {into.owner, 1, 0, block_state::allocated};
    into.blocks.push_back(block_id{id});
  }
}

bool block_pool::is_owned(block_owner owner, block_id id) const noexcept {
  return id.value < blocks_.size() && blocks_[id.value].state != block_state::free &&
         blocks_[id.value].owner == owner;
}

result<void> block_pool::owned(block_owner owner, block_id id, const char* verb) const {
  if (is_owned(owner, id)) return {};
  if (id.value >= blocks_.size()) {
    return fail(errc::out_of_range, std::string{"pool: cannot "} + verb + " block " +
                                        std::to_string(id.value) + ", the pool has " +
                                        std::to_string(blocks_.size()));
  }
  const bool is_free = blocks_[id.value].state == block_state::free;
  return fail(errc::not_found, std::string{"pool: cannot "} + verb + " block " +
                                   std::to_string(id.value) +
                                   (is_free ? ", it is free" : ", it is another owner's") +
                                   "; it was given back before, or was never this owner's");
}

result<void> block_pool::retain(block_owner owner, std::span<const block_id> ids) {
  for (const auto id : ids) {
    if (auto ok = owned(owner, id, "retain"); !ok) return ok;
    if (blocks_[id.value].state == block_state::quarantined) {
      return fail(errc::not_found, "pool: cannot retain block " + std::to_string(id.value) +
                                       ", it was freed and waits in quarantine");
    }
  }
  for (const auto id : ids) ++blocks_[id.value].references;
  return {};
}

result<release_count> block_pool::free(block_owner owner, std::span<const block_id> ids) {
  std::vector<std::uint32_t> back;
  back.reserve(ids.size());
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (!is_owned(owner, ids[i]) || blocks_[ids[i].value].references == 0) {
      // Reverts first, since building the sentence may run out of memory.
      for (std::size_t j = 0; j < i; ++j) ++blocks_[ids[j].value].references;
      if (auto ok = owned(owner, ids[i], "free"); !ok) return fail(std::move(ok).error());
      return fail(errc::not_found, "pool: block " + std::to_string(ids[i].value) +
                                       " is freed twice; its last reference is gone");
    }
    --blocks_[ids[i].value].references;
  }
  release_count counts;
  for (const auto id : ids) {
    block& b = blocks_[id.value];
    if (b.state != block_state::allocated) continue;  // named twice: counted at its first mention
    if (b.references > 0) {
      ++counts.kept;
    } else if (b.pins > 0) {
      b.state = block_state::quarantined;
      ++counts.quarantined;
    } else {
      b.state = block_state::free;
      back.push_back(id.value);
      ++counts.freed;
    }
  }
  counters_.allocated -= counts.quarantined + counts.freed;
  counters_.quarantined += counts.quarantined;
  counters_.free += counts.freed;
  return_blocks(std::move(back));
  return counts;
}

// -- pins

result<void> block_pool::pin(block_owner owner, std::span<const block_id> ids) {
  for (const auto id : ids) {
    if (auto ok = owned(owner, id, "pin"); !ok) return ok;
  }
  for (const auto id : ids) {
    if (blocks_[id.value].pins++ == 0) ++counters_.pinned;
  }
  return {};
}

result<release_count> block_pool::unpin(block_owner owner, std::span<const block_id> ids) {
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (!is_owned(owner, ids[i]) || blocks_[ids[i].value].pins == 0) {
      for (std::size_t j = 0; j < i; ++j) {
        if (blocks_[ids[j].value].pins++ == 0) ++counters_.pinned;
      }
      if (auto ok = owned(owner, ids[i], "unpin"); !ok) return fail(std::move(ok).error());
      return fail(errc::not_found, "pool: block " + std::to_string(ids[i].value) +
                                       " has no pin left; it was unpinned before");
    }
    if (--blocks_[ids[i].value].pins == 0) --counters_.pinned;
  }
  release_count counts;
  std::vector<std::uint32_t> back;
  try {
    back.reserve(ids.size());
  } catch (const std::bad_alloc&) {
    unlisted_ = true;  // a pin must be taken back even then: the next allocation lists the runs
  }
  for (const auto id : ids) {
    block& b = blocks_[id.value];
    switch (b.state) {
      case block_state::free: break;  // named twice: counted at its first mention
      case block_state::allocated: ++counts.kept; break;
      case block_state::quarantined:
        if (b.pins > 0) {
          ++counts.quarantined;
        } else {
          b.state = block_state::free;
          if (!unlisted_) back.push_back(id.value);
          ++counts.freed;
        }
        break;
    }
  }
  counters_.quarantined -= counts.freed;
  counters_.free += counts.freed;
  return_blocks(std::move(back));
  return counts;
}

void block_pool::return_blocks(std::vector<std::uint32_t> ids) noexcept {
  if (unlisted_) return;
  std::sort(ids.begin(), ids.end());
  try {
    for (std::size_t i = 0; i < ids.size();) {
      std::size_t end = i + 1;
      while (end < ids.size() && ids[end] == ids[end - 1] + 1) ++end;
      return_run(ids[i], static_cast<std::uint32_t>(end - i));
      i = end;
    }
  } catch (const std::bad_alloc&) {
    unlisted_ = true;  // the blocks are free nevertheless: the next allocation lists the runs
  }
}

void block_pool::list_free_runs() {
  free_runs_.clear();
  runs_by_length_.clear();
  const auto count = static_cast<std::uint32_t>(blocks_.size());
  for (std::uint32_t start = 0; start < count;) {
    auto end = start;
    while (end < count && blocks_[end].state == block_state::free) ++end;
    if (end != start) {
      free_runs_.emplace(start, end - start);
      runs_by_length_.emplace(end - start, start);
    }
    start = end + 1;
  }
  unlisted_ = false;
}

void block_pool::return_run(std::uint32_t start, std::uint32_t length) {
  const auto after = free_runs_.lower_bound(start);
  if (after != free_runs_.end() && after->first == start + length) {
    length += after->second;
    runs_by_length_.erase({after->second, after->first});
    free_runs_.erase(after);
  }
  const auto next = free_runs_.lower_bound(start);
  if (next != free_runs_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == start) {
      start = before->first;
      length += before->second;
      runs_by_length_.erase({before->second, before->first});
      free_runs_.erase(before);
    }
  }
  free_runs_.emplace(start, length);
  runs_by_length_.emplace(length, start);
}

// -- waiting

result<waiter_id> block_pool::wait(std::uint32_t count, time_point deadline) {
  if (count > counters_.total) {
    ++counters_.refused;
    return fail(exhausted(count));
  }
  if (waiters_.size() >= max_waiters_) {
    return fail(errc::overloaded, "pool: " + std::to_string(waiters_.size()) +
                                      " requests wait already; try again later");
  }
  const waiter_id id{next_waiter_++};
  const auto place = deadlines_.emplace(deadline, id).first;
  or_undo([&] { waiters_.emplace(id, waiter{count, deadline}); }, [&] { deadlines_.erase(place); });
  counters_.waited_blocks += count;
  return id;
}

result<void> block_pool::cancel(waiter_id id) {
  const auto found = waiters_.find(id);
  if (found == waiters_.end()) {
    return fail(errc::not_found, "pool: waiter " + std::to_string(id.value) +
                                     " is not in the queue; it was served or has expired");
  }
  leave_queue(found);
  return {};
}

void block_pool::leave_queue(std::map<waiter_id, waiter>::iterator at) {
  counters_.waited_blocks -= at->second.count;
  deadlines_.erase({at->second.deadline, at->first});
  waiters_.erase(at);
}

std::vector<served_waiter> block_pool::serve(time_point now) {
  std::vector<served_waiter> served;
  try {
    while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
      const auto late = waiters_.find(deadlines_.begin()->second);
      served.push_back(
          {late->first,
           fail(errc::deadline, "pool: waited for " + std::to_string(late->second.count) +
                                    " blocks until the deadline; make the pool larger or send "
                                    "fewer requests at once")});
      ++counters_.refused;
      leave_queue(late);
    }
    if (unlisted_) list_free_runs();
    while (!waiters_.empty() && waiters_.begin()->second.count <= counters_.free) {
      const auto first = waiters_.begin();
      if (served.size() == served.capacity()) served.reserve(2 * served.size() + 1);
      served.push_back({first->first, take(first->second.count)});
      leave_queue(first);
    }
  } catch (const std::bad_alloc&) {
    if (served.empty()) throw;
    // Waiters that were served have left the queue and must be told; the others stay in it.
  }
  return served;
}

std::optional<block_pool::time_point> block_pool::next_deadline() const {
  if (deadlines_.empty()) return std::nullopt;
  return deadlines_.begin()->first;
}

// -- properties

pool_counters block_pool::counters() const noexcept {
  pool_counters counters = counters_;
  counters.waiters = static_cast<std::uint32_t>(waiters_.size());
  return counters;
}

std::uint32_t block_pool::longest_free_run() const noexcept {
  return runs_by_length_.empty() ? 0 : runs_by_length_.rbegin()->first;
}

}  // namespace troupe::kvcache
