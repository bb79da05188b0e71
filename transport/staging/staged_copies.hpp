#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "troupe/transport/progress_engine.hpp"
#include "troupe/transport/region_table.hpp"
#include "troupe/transport/staging/staging_pool.hpp"

namespace troupe::transport::staging {

/// All copies of one lane's part of a batch into GPU memory. Thread-safe.
class copy_group {
 public:
  void begin() noexcept { under_way_.fetch_add(1, std::memory_order_relaxed); }
  void end() noexcept { under_way_.fetch_sub(1, std::memory_order_release); }
  /// Keeps the first failure.
  void note(const troupe::error& failure);

  [[nodiscard]] bool idle() const noexcept {
    return under_way_.load(std::memory_order_acquire) == 0;
  }
  [[nodiscard]] std::optional<troupe::error> failure() const;

 private:
  std::atomic<std::uint32_t> under_way_{0};
  mutable std::mutex mutex_;
  std::optional<troupe::error> failure_;
};

/// One copy between a chunk and GPU memory.
struct staged_copy {
  /// Whether the GPUs are done with the copy.
  [[nodiscard]] bool flown() const noexcept;

  staging_chunk chunk;
  std::vector<xgmi::flight> flights;
  std::vector<region_use> memory;  ///< held until the copy has ended
  transfer_id transfer;
  std::uint64_t batch{0};  ///< our batch, which fails if the copy fails; 0 if none
  std::shared_ptr<copy_group> group;
  std::uint64_t bytes{0};
  std::optional<troupe::error> failure;  ///< read it only when the copy has ended
  std::atomic<bool> ended{false};
};

/// The copies in flight of one link. No thread waits for a copy: the thread that makes progress
/// calls `look`, and is woken if it sleeps. A transfer's copies in flight keep its regions
/// registered and its fence pending. Thread-safe.
class staged_copies {
 public:
  staged_copies(std::shared_ptr<staging_pool> pool, progress_engine& engine)
      : pool_{std::move(pool)},
        engine_{engine},
        bell_{std::make_shared<ends_bell>(engine.waker())} {}
  staged_copies(const staged_copies&) = delete;
  staged_copies& operator=(const staged_copies&) = delete;
  /// Waits some seconds at most for copies in flight, since their chunks are reused.
  ~staged_copies();

  struct order {
    direction dir{direction::write};  ///< `write`: into the chunk; `read`: out of it
    std::span<const memory_run> runs;
    run_cursor from;
    std::uint64_t bytes{0};
    std::span<const region_use> memory;  ///< the regions of the runs
    transfer_id transfer;
    std::uint64_t batch{0};
    std::shared_ptr<copy_group> group;
  };
  /// Call it under a pin of the memory's guard. A failure is reported only at the end of the copy.
  std::shared_ptr<staged_copy> start(staging_chunk chunk, const order& what);
  /// A copy that failed before it began.
  std::shared_ptr<staged_copy> refuse(const order& what, troupe::error why);
  /// `staging_pool::lend`. A caller left without a chunk is notified by `look` to try again, as
  /// after a copy that ended.
  [[nodiscard]] result<staging_chunk> lend(const std::shared_ptr<chunk_quota>& quota);
  [[nodiscard]] result<void> prepare(std::uint32_t gpu) { return pool_->prepare(gpu); }
  [[nodiscard]] staging_pool& pool() const noexcept { return *pool_; }

  /// Whether `look` has anything to do. The only check that a link without GPUs makes.
  [[nodiscard]] bool any() const noexcept {
    return under_way_.load(std::memory_order_seq_cst) != 0 ||
           starved_.load(std::memory_order_seq_cst);
  }

  /// Called before a sleep while `any()`: has the engine woken when the copies in flight on the
  /// GPUs have ended. A lost GPU wakes nobody, so a sleeper must look now and then. Returns false
  /// if it must look again at once.
  [[nodiscard]] bool may_sleep();

  struct news {
    bool ended{false};  ///< a copy has ended: its waiters, and those for its chunk, may go on
    std::vector<std::pair<std::uint64_t, troupe::error>> failed;  ///< our batches
    std::vector<transfer_id> quiescent;                           ///< fenced transfers
  };
  [[nodiscard]] news look();
  /// Call it once nothing can start a copy of the transfer any more. Returns whether copies are in
  /// flight; `look` then reports when they have ended.
  [[nodiscard]] bool fence(transfer_id transfer);
  /// Whether a copy of the transfer is in flight, for callers that poll.
  [[nodiscard]] bool touches(transfer_id transfer);

 private:
  /// Rung by the driver, perhaps late.
  class ends_bell final : public xgmi::bell {
   public:
    explicit ends_bell(std::shared_ptr<engine_waker> wakes) noexcept : wakes_{std::move(wakes)} {}
    void ring() noexcept override {
      disarm();
      wakes_->wake();
    }
    /// Returns whether it was armed before.
    [[nodiscard]] bool arm() noexcept { return armed_.exchange(true, std::memory_order_seq_cst); }
    void disarm() noexcept { armed_.store(false, std::memory_order_seq_cst); }

   private:
    const std::shared_ptr<engine_waker> wakes_;
    std::atomic<bool> armed_{false};
  };
  [[nodiscard]] bool any_flown();
  void end(staged_copy& copy, news& told, std::vector<region_use>& unused);
  [[nodiscard]] bool has(transfer_id transfer) const;

  const std::shared_ptr<staging_pool> pool_;
  progress_engine& engine_;
  const std::shared_ptr<ends_bell> bell_;
  std::atomic<std::uint32_t> under_way_{0};
  std::atomic<bool> starved_{false};
  std::mutex mutex_;  ///< guards what follows; never held while waiting
  std::vector<std::shared_ptr<staged_copy>> copies_;
  std::set<std::uint64_t> fenced_;
};

}  // namespace troupe::transport::staging
