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

/// The copies of one lane's part of a batch into memory of GPUs, taken together. Thread-safe.
class copy_group {
 public:
  void begin() noexcept { under_way_.fetch_add(1, std::memory_order_relaxed); }
  void end() noexcept { under_way_.fetch_sub(1, std::memory_order_release); }
  /// The first one is kept.
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

/// One copy between a chunk and memory of GPUs.
struct staged_copy {
  /// The GPUs are done with it.
  [[nodiscard]] bool flown() const noexcept;

  staging_chunk chunk;
  std::vector<xgmi::flight> flights;
  std::vector<region_use> memory;  ///< until the copy has ended
  transfer_id transfer;
  std::uint64_t batch{0};  ///< of ours that ends where the copy fails; 0: none
  std::shared_ptr<copy_group> group;
  std::uint64_t bytes{0};
  std::optional<troupe::error> failure;  ///< to be read when it has ended
  std::atomic<bool> ended{false};
};

/// The copies of one link that are under way. Nobody waits for one: who makes progress looks, and is
/// woken when it sleeps. What a
/// transfer has under way keeps its regions registered and its fence from being answered. Thread-safe.
class staged_copies {
 public:
  staged_copies(std::shared_ptr<staging_pool> pool, progress_engine& engine)
      : pool_{std::move(pool)},
        engine_{engine},
        bell_{std::make_shared<ends_bell>(engine.waker())} {}
  staged_copies(const staged_copies&) = delete;
  staged_copies& operator=(const staged_copies&) = delete;
  /// Waits for what is under way, for some seconds at most: its chunks are used again.
  ~staged_copies();

  struct order {
    direction dir{direction::write};  ///< `write`: into the chunk; `read`: out of it
    std::span<const memory_run> runs;
    run_cursor from;
    std::uint64_t bytes{0};
    std::span<const region_use> memory;  ///< where the runs are
    transfer_id transfer;
    std::uint64_t batch{0};
    std::shared_ptr<copy_group> group;
  };
  /// Under a pin of the memory's guard; it never fails but at its end.
  std::shared_ptr<staged_copy> start(staging_chunk chunk, const order& what);
  /// One that failed before it began.
  std::shared_ptr<staged_copy> refuse(const order& what, troupe::error why);
  /// `staging_pool::lend`; who is left without one is called again, as after a copy that ended.
  [[nodiscard]] result<staging_chunk> lend(const std::shared_ptr<chunk_quota>& quota);
  [[nodiscard]] result<void> prepare(std::uint32_t gpu) { return pool_->prepare(gpu); }
  [[nodiscard]] staging_pool& pool() const noexcept { return *pool_; }

  /// Whether there is something to look at. All that a link without GPUs ever asks.
  [[nodiscard]] bool any() const noexcept {
    return under_way_.load(std::memory_order_seq_cst) != 0 ||
           starved_.load(std::memory_order_relaxed);
  }

  /// Before a sleep, while there is something to look at: the engine is woken when what the GPUs have
  /// under way has ended. Not by a GPU that is lost: who sleeps looks now and then. False: look again
  /// at once.
  [[nodiscard]] bool may_sleep();

  struct news {
    bool ended{false};  ///< some copy has: whoever waited for it, or for its chunk, may go on
    std::vector<std::pair<std::uint64_t, troupe::error>> failed;  ///< batches of ours
    std::vector<transfer_id> quiescent;                           ///< of `fence`
  };
  [[nodiscard]] news look();
  /// After everything that could start a copy of the transfer was withdrawn. True: some are under way,
  /// and `look` will say when they have ended.
  [[nodiscard]] bool fence(transfer_id transfer);
  /// Whether a copy of the transfer is under way, for who asks again instead of being told.
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
    /// True: it was armed before.
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
  std::mutex mutex_;  ///< of what follows; nothing is waited for under it
  std::vector<std::shared_ptr<staged_copy>> copies_;
  std::set<std::uint64_t> fenced_;
};

}  // namespace troupe::transport::staging
