#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "troupe/transport/xgmi/gpu_runtime.hpp"

namespace troupe::transport::xgmi {

/// One stream of copies and its progress. The work given to it ends in order; a *mark* is a place
/// in that order. Thread-safe.
class copy_lane {
 public:
  copy_lane(gpu_runtime& runtime, gpu_stream stream) noexcept
      : runtime_{&runtime}, stream_{stream} {}
  copy_lane(const copy_lane&) = delete;
  copy_lane& operator=(const copy_lane&) = delete;
  /// Waits for the work in flight.
  ~copy_lane();

  [[nodiscard]] gpu_stream stream() const noexcept { return stream_; }
  /// Sets a mark behind all work given to the stream so far. Never fails: if the driver refuses,
  /// only this mark has failed, and it is still reached once the work before it has ended. If the
  /// GPU is lost the lane has failed and all its marks are reached.
  [[nodiscard]] std::uint64_t mark();
  /// Whether all marked work has ended.
  [[nodiscard]] bool idle() const noexcept {
    return reached_.load(std::memory_order_acquire) >= last_.load(std::memory_order_acquire);
  }
  [[nodiscard]] bool reached(std::uint64_t mark) const noexcept {
    return reached_.load(std::memory_order_acquire) >= mark;
  }
  /// Asks the driver for progress. Returns whether there was any.
  bool look();
  /// Rings `what` when all work in flight has ended well. Returns false if there is none.
  [[nodiscard]] result<bool> ring_at_end(const std::shared_ptr<bell>& what);
  /// Whether the lane has failed for good.
  [[nodiscard]] bool failed() const noexcept { return failed_.load(std::memory_order_acquire); }
  /// Why the work before a reached mark cannot be trusted, if so. Returned once per mark.
  [[nodiscard]] std::optional<troupe::error> take_failure(std::uint64_t mark);

 private:
  struct waiting {
    std::uint64_t mark{0};
    gpu_event event{};  ///< empty if the driver refused it; tried again later
  };
  [[nodiscard]] result<gpu_event> event_behind();
  [[nodiscard]] bool hear_of_front();
  [[nodiscard]] bool spoil(std::uint64_t mark, troupe::error why);
  void fail_all(troupe::error why);

  gpu_runtime* runtime_;
  gpu_stream stream_;
  mutable std::mutex mutex_;
  std::deque<waiting> waiting_;
  std::vector<gpu_event> free_;
  std::atomic<std::uint64_t> last_{0};  ///< written under `mutex_`
  std::atomic<std::uint64_t> reached_{0};
  std::atomic<bool> failed_{false};
  std::optional<troupe::error> failure_;
  std::map<std::uint64_t, troupe::error> spoiled_;  ///< marks that failed alone
  std::atomic<std::size_t> spoiled_count_{0};
  /// When the current series of refusals began.
  std::optional<std::chrono::steady_clock::time_point> refused_since_;
};

/// The lanes of one GPU and the tables that its kernels read.
class device_lanes {
 public:
  /// Two, so that the next launch runs while the last thread blocks of one end. Each lane gets half
  /// of the share of the GPU.
  static constexpr std::size_t lane_count = 2;
  /// Limit of the bytes of lent tables; batches beyond it wait.
  static constexpr std::size_t most_table_bytes = std::size_t{64} << 20;
  static constexpr std::size_t small_table = std::size_t{16} << 10;
  static constexpr std::size_t large_table = std::size_t{256} << 10;

  [[nodiscard]] static result<std::unique_ptr<device_lanes>> make(gpu_runtime& runtime,
                                                                  std::uint32_t device);
  device_lanes(const device_lanes&) = delete;
  device_lanes& operator=(const device_lanes&) = delete;
  ~device_lanes();

  [[nodiscard]] std::uint32_t device() const noexcept { return device_; }
  [[nodiscard]] gpu_runtime& runtime() const noexcept { return *runtime_; }
  [[nodiscard]] copy_lane& lane(std::size_t index) const noexcept { return *lanes_[index]; }
  /// The index of the next lane; lanes take turns.
  [[nodiscard]] std::size_t next() noexcept {
    return turn_.fetch_add(1, std::memory_order_relaxed) % lane_count;
  }

  /// Whether all lanes are idle, as of the last `look`.
  [[nodiscard]] bool idle() const noexcept { return lanes_[0]->idle() && lanes_[1]->idle(); }

  /// Lends a table of at least `bytes`, or of the largest size. The pool grows if it is empty.
  [[nodiscard]] result<pinned_memory> lend_table(std::size_t bytes);
  void take_back(const pinned_memory& table);
  /// Whether so many tables are lent that batches should wait.
  [[nodiscard]] bool crowded() const noexcept {
    return lent_.load(std::memory_order_acquire) >= most_table_bytes;
  }

 private:
  device_lanes(gpu_runtime& runtime, std::uint32_t device) noexcept
      : runtime_{&runtime}, device_{device} {}
  [[nodiscard]] result<void> add_tables(std::size_t size, std::vector<pinned_memory>& to);

  gpu_runtime* runtime_;
  std::uint32_t device_;
  std::vector<std::unique_ptr<copy_lane>> lanes_;
  std::atomic<std::size_t> turn_{0};
  std::mutex mutex_;
  std::vector<pinned_memory> slabs_;
  std::vector<pinned_memory> small_;
  std::vector<pinned_memory> large_;
  std::atomic<std::size_t> lent_{0};
};

/// The lanes of all GPUs that this endpoint copies with, created on first use. Thread-safe.
class copy_lanes {
 public:
  explicit copy_lanes(gpu_runtime& runtime) : runtime_{&runtime} {}

  [[nodiscard]] result<device_lanes*> on(std::uint32_t device);
  /// Asks the driver for progress of all lanes. Returns whether there was any.
  bool look();
  /// Rings `what` once for each busy lane, when the lane's work has ended. Returns false if no lane
  /// is busy or the driver refused.
  bool ring_at_ends(const std::shared_ptr<bell>& what);

 private:
  gpu_runtime* runtime_;
  std::mutex mutex_;
  std::map<std::uint32_t, std::unique_ptr<device_lanes>> devices_;
  /// The entries of `devices_`, for readers without the lock.
  static constexpr std::size_t most = 64;
  std::array<std::atomic<device_lanes*>, most> known_{};
};

}  // namespace troupe::transport::xgmi
