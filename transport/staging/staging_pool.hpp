#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "troupe/transport/staging/memory_run.hpp"
#include "troupe/transport/types.hpp"
#include "troupe/transport/xgmi/batch_launch.hpp"
#include "troupe/transport/xgmi/gpu_site.hpp"
#include "troupe/transport/xgmi/late_calls.hpp"
#include "troupe/transport/xgmi/options.hpp"

namespace troupe::transport::staging {

/// How many chunks one direction of a lane may hold: one on the wire, one that the GPU copies, one
/// in between. Each direction has its own quota, so that none waits for another; a direction
/// without a chunk left waits for its own copies or its own socket. Thread-safe.
class chunk_quota {
 public:
  static constexpr std::uint32_t most = 3;

  [[nodiscard]] bool take() noexcept {
    auto left = left_.load(std::memory_order_relaxed);
    while (left > 0) {
      if (left_.compare_exchange_weak(left, left - 1, std::memory_order_acquire)) return true;
    }
    return false;
  }
  void give_back() noexcept { left_.fetch_add(1, std::memory_order_release); }

 private:
  std::atomic<std::uint32_t> left_{most};
};

class staging_pool;

/// Pinned memory on loan, accessible to host and GPUs. Returned to its pool by its last owner. An
/// empty chunk has no memory; a chunk of `somebody_elses` is not returned.
class staging_chunk {
 public:
  staging_chunk() = default;
  staging_chunk(std::shared_ptr<staging_pool> from, std::shared_ptr<chunk_quota> quota,
                const xgmi::pinned_memory& memory) noexcept
      : from_{std::move(from)}, quota_{std::move(quota)}, memory_{memory} {}
  /// The owner of the memory must keep it until every use of the chunk has ended.
  [[nodiscard]] static staging_chunk somebody_elses(const xgmi::pinned_memory& memory) noexcept {
    return {nullptr, nullptr, memory};
  }
  staging_chunk(staging_chunk&&) noexcept = default;
  staging_chunk& operator=(staging_chunk&& other) noexcept {
    if (this != &other) {
      release();
      from_ = std::move(other.from_);
      quota_ = std::move(other.quota_);
      memory_ = other.memory_;
    }
    return *this;
  }
  ~staging_chunk() { release(); }

  explicit operator bool() const noexcept { return from_ != nullptr; }
  [[nodiscard]] std::span<std::byte> bytes() const noexcept { return {memory_.host, memory_.size}; }
  [[nodiscard]] std::uint64_t device_address() const noexcept { return memory_.device_address; }
  /// Ends the loan early.
  void release() noexcept;

 private:
  std::shared_ptr<staging_pool> from_;
  std::shared_ptr<chunk_quota> quota_;
  xgmi::pinned_memory memory_{};
};

/// The pinned memory of one endpoint through which bytes move between its GPUs and its peers, and
/// the streams that copy them. Chunks are reused until the endpoint ends. Thread-safe.
class staging_pool : public std::enable_shared_from_this<staging_pool> {
 public:
  /// Large enough to make the start of a copy negligible, small enough that most transfers have two
  /// in flight at once.
  static constexpr std::size_t chunk_size = std::size_t{1} << 20;

  staging_pool(std::shared_ptr<xgmi::gpu_site> site, xgmi_options options);
  staging_pool(const staging_pool&) = delete;
  staging_pool& operator=(const staging_pool&) = delete;
  ~staging_pool();

  /// Call it before memory of `gpu` is copied for the first time: slow setup is done here, not
  /// where bytes move. Returns the errors of the GPU; `backend_unavailable` once a GPU was lost.
  [[nodiscard]] result<void> prepare(std::uint32_t gpu);
  /// As `prepare`, for callers with chunks of their own.
  [[nodiscard]] result<void> prepare_streams(std::uint32_t gpu);
  [[nodiscard]] xgmi::gpu_runtime& runtime() const noexcept { return *site_->runtime; }
  /// Returns an empty chunk if the quota is used up, or if the host gives no more pinned memory and
  /// other lanes hold all chunks (then `starved` is set): try again. An error if there is no chunk
  /// at all.
  [[nodiscard]] result<staging_chunk> lend(const std::shared_ptr<chunk_quota>& quota,
                                           bool& starved);

  struct started {
    std::vector<xgmi::flight> flights;  ///< one per copying GPU, also after a failure
    std::optional<troupe::error> failure;
  };
  /// Starts to copy the next `bytes` of `runs` from `from` on, into the chunk (`write`) or out of
  /// it. Host memory is copied when this returns. The memory must be pinned meanwhile, and stay
  /// until the flights have ended.
  [[nodiscard]] started copy(direction dir, std::span<const memory_run> runs, run_cursor from,
                             std::uint64_t bytes, const staging_chunk& chunk);
  /// Makes a call on a separate thread: it may wait for all the work of a GPU. The call must not
  /// hold the pool.
  void later(std::function<void()> call) { late_.give(std::move(call)); }
  /// Polls the GPUs for progress.
  void look() { lanes_->look(); }
  /// Rings when the copies now in flight on the GPUs have ended. Returns false if there are none,
  /// or if it cannot ring.
  [[nodiscard]] bool ring_at_ends(const std::shared_ptr<xgmi::bell>& what) {
    return lanes_->ring_at_ends(what);
  }

 private:
  friend class staging_chunk;
  void take_back(const xgmi::pinned_memory& memory) noexcept;
  [[nodiscard]] result<void> add_chunks(std::uint32_t gpu);
  [[nodiscard]] result<void> launch(direction dir, std::uint32_t gpu,
                                    std::span<const segment> segments, std::uint64_t bytes,
                                    const staging_chunk& chunk, std::vector<xgmi::flight>& flights);

  const std::shared_ptr<xgmi::gpu_site> site_;
  const xgmi_options options_;
  std::mutex mutex_;  ///< guards what follows, up to the lanes
  std::vector<xgmi::pinned_memory> slabs_;
  std::vector<xgmi::pinned_memory> free_;
  std::size_t lent_{0};
  std::uint32_t gpu_{0};  ///< the last one prepared
  std::unique_ptr<xgmi::copy_lanes> lanes_;
  xgmi::late_calls late_;  ///< destroyed first: its calls need the runtime
};

}  // namespace troupe::transport::staging
