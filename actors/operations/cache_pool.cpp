#include "troupe/actors/operations/cache_pool.hpp"

#include <string>
#include <utility>

namespace troupe::actors {

void cache_pool::remember(const kvcache::allocation& blocks) {
  for (const auto block : blocks.blocks) owner_of_[block.value] = blocks.owner;
}

result<kvcache::allocation> cache_pool::allocate(std::uint32_t count) {
  const std::lock_guard lock{mutex_};
  auto got = pool_.allocate(count);
  if (got) remember(*got);
  return got;
}

result<kvcache::release_count> cache_pool::free(kvcache::block_owner owner,
                                                std::span<const block_id> blocks) {
  std::unique_lock lock{mutex_};
  auto freed = pool_.free(owner, blocks);
  const bool waiters = freed && freed->freed > 0 && pool_.counters().waiters > 0;
  lock.unlock();
  wake_waiters(waiters);
  return freed;
}

std::span<const block_id> cache_pool::of_one_owner(
    std::span<const block_id> blocks) const noexcept {
  const auto owner = owner_of_[blocks.front().value];
  std::size_t count = 1;
  while (count < blocks.size() && owner_of_[blocks[count].value] == owner) ++count;
  return blocks.first(count);
}

result<void> cache_pool::pin(std::span<const block_id> blocks) {
  const std::lock_guard lock{mutex_};
  for (const auto block : blocks) {
    if (block.value >= owner_of_.size()) {
      return fail(errc::out_of_range, "block " + std::to_string(block.value) +
                                          " is not in the pool of " +
                                          std::to_string(owner_of_.size()) + " blocks");
    }
  }
  for (std::size_t done = 0; done < blocks.size();) {
    const auto next = of_one_owner(blocks.subspan(done));
    auto pinned = pool_.pin(owner_of_[next.front().value], next);
    if (!pinned) {
      // Cannot fail: they were pinned a moment ago under the same lock.
      (void)unpin_locked(blocks.first(done));
      return pinned;
    }
    done += next.size();
  }
  return {};
}

result<bool> cache_pool::unpin_locked(std::span<const block_id> blocks) {
  result<bool> freed{false};
  while (!blocks.empty()) {
    const auto next = of_one_owner(blocks);
    blocks = blocks.subspan(next.size());
    auto released = pool_.unpin(owner_of_[next.front().value], next);
    if (!released) {
      freed = fail(std::move(released).error());
    } else if (freed && released->freed > 0) {
      freed = true;
    }
  }
  return freed;
}

result<void> cache_pool::unpin(std::span<const block_id> blocks) {
  std::unique_lock lock{mutex_};
  auto freed = unpin_locked(blocks);
  // Asked even if some were refused: others may have come back.
  const bool waiters = (!freed || *freed) && pool_.counters().waiters > 0;
  lock.unlock();
  wake_waiters(waiters);
  if (!freed) return fail(std::move(freed).error());
  return {};
}

result<kvcache::waiter_id> cache_pool::wait(std::uint32_t count, time_point deadline) {
  const std::lock_guard lock{mutex_};
  return pool_.wait(count, deadline);
}

void cache_pool::cancel(kvcache::waiter_id waiter) {
  std::unique_lock lock{mutex_};
  // `not_found` means that it was served meanwhile, which the caller learns from `serve`.
  const bool left = pool_.cancel(waiter).has_value();
  const bool waiters = left && pool_.counters().waiters > 0;
  lock.unlock();
  wake_waiters(waiters);
}

std::vector<kvcache::served_waiter> cache_pool::serve(time_point now) {
  const std::lock_guard lock{mutex_};
  auto served = pool_.serve(now);
  for (const auto& waiter : served) {
    if (waiter.outcome) remember(*waiter.outcome);
  }
  return served;
}

kvcache::pool_counters cache_pool::counters() const {
  const std::lock_guard lock{mutex_};
  return pool_.counters();
}

void cache_pool::on_blocks_for_waiters(std::function<void()> call) {
  const std::lock_guard lock{mutex_};
  wake_ = std::move(call);
}

void cache_pool::wake_waiters(bool someone_waits) {
  if (!someone_waits) return;
  std::function<void()> call;
  {
    const std::lock_guard lock{mutex_};
    call = wake_;
  }
  if (call) call();
}

}  // namespace troupe::actors
