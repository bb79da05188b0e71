#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <span>
#include <vector>

#include "troupe/kvcache/block_pool.hpp"
#include "troupe/kvcache/result.hpp"

namespace troupe::actors {

/// The block pool of a node, for callers that cannot wait for an actor's answer (the engine's own
/// threads), and for the pool_manager, which serves the waiting line. Thread-safe. The transfer
/// side names blocks without their owner: a transfer pins blocks that the engine, the owner, named.
class cache_pool {
 public:
  using time_point = kvcache::block_pool::time_point;

  explicit cache_pool(std::uint32_t blocks) : pool_{blocks}, owner_of_(blocks) {}

  [[nodiscard]] result<kvcache::allocation> allocate(std::uint32_t count);
  /// `not_found`, `out_of_range`: nothing is freed. Blocks still pinned go to quarantine.
  [[nodiscard]] result<kvcache::release_count> free(kvcache::block_owner owner,
                                                    std::span<const block_id> blocks);
  /// Pins blocks for a transfer, whatever their owner. `not_found`: one of them is not allocated,
  /// and none is pinned.
  [[nodiscard]] result<void> pin(std::span<const block_id> blocks);
  /// Needs no memory to succeed.
  [[nodiscard]] result<void> unpin(std::span<const block_id> blocks);

  [[nodiscard]] result<kvcache::waiter_id> wait(std::uint32_t count, time_point deadline);
  void cancel(kvcache::waiter_id waiter);
  [[nodiscard]] std::vector<kvcache::served_waiter> serve(time_point now);

  [[nodiscard]] kvcache::pool_counters counters() const;

  /// Called, with no lock held, when blocks came back while a waiter is in line.
  void on_blocks_for_waiters(std::function<void()> call);

 private:
  void remember(const kvcache::allocation& blocks);
  /// The first of the blocks, as many as have the same owner. There must be one.
  [[nodiscard]] std::span<const block_id> of_one_owner(
      std::span<const block_id> blocks) const noexcept;
  /// Returns whether a block became free.
  result<bool> unpin_locked(std::span<const block_id> blocks);
  void wake_waiters(bool someone_waits);

  mutable std::mutex mutex_;
  kvcache::block_pool pool_;
  std::vector<kvcache::block_owner> owner_of_;  ///< the last owner of each block
  std::function<void()> wake_;
};

}  // namespace troupe::actors
