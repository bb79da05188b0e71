#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "troupe/kvcache/ids.hpp"
#include "troupe/kvcache/result.hpp"
#include "troupe/transport/shm/wire.hpp"
#include "troupe/transport/xgmi/gpu_site.hpp"

namespace troupe::transport::xgmi {

/// A peer's region as seen by one of our GPUs.
struct reachable_region {
  std::byte* base{nullptr};
  std::uint64_t size{0};
  std::shared_ptr<const void> use;  ///< keeps the region from being closed; released last
  std::shared_ptr<const opened_allocation> open;  ///< null for memory of this process
};

/// A region that its owner has deregistered and that is no longer used here.
struct parted_region {
  region_id id;
  allocation_key allocation;  ///< valid for any GPU
  std::vector<std::shared_ptr<const opened_allocation>> open;
};

/// The regions of one link's peer in GPU memory, opened when a copy first needs them. Thread-safe.
class peer_gpu_regions {
 public:
  static constexpr std::size_t max_regions = 4096;

  peer_gpu_regions(gpu_site& site, bool same_process, std::uint32_t pid) noexcept
      : site_{&site}, same_process_{same_process}, pid_{pid} {}

  /// Adds a region. `unauthorized` (not within its allocation, or shared before), `overloaded`.
  [[nodiscard]] result<void> add(const shm::gpu_region_shared_message& shared);
  /// Handles the deregistration by the owner: no new use of the region begins.
  void part_with(region_id region);
  /// Whether deregistered regions are still waiting for the end of their last use.
  [[nodiscard]] bool any_parting() const;
  /// Returns the deregistered regions whose last use has ended, each once. The caller closes them.
  [[nodiscard]] std::vector<parted_region> take_parted();
  /// Returns all regions. The caller closes them.
  [[nodiscard]] std::vector<parted_region> take_all();
  [[nodiscard]] bool knows(region_id region) const;
  /// Opens the region for copies by our GPU `device`. `grant_revoked` (it is not, or no longer,
  /// shared), `backend_unavailable` (the GPUs cannot reach each other, or that is unknown for a GPU
  /// that this process does not see), and the errors of opening it.
  [[nodiscard]] result<reachable_region> reach(region_id region, std::uint32_t device);

 private:
  struct record {
    shm::gpu_region_shared_message said;
    std::map<std::uint32_t, reachable_region> by_device;
    std::shared_ptr<const void> use;  ///< the record's own, until it is parted with
    std::shared_ptr<const std::atomic<bool>> unused;
  };
  [[nodiscard]] static record record_of(const shm::gpu_region_shared_message& said);
  [[nodiscard]] parted_region closed_of(region_id id, record& from) const;
  [[nodiscard]] allocation_key key_of(const shm::gpu_region_shared_message& said,
                                      std::uint32_t device) const;
  [[nodiscard]] result<reachable_region> open(const shm::gpu_region_shared_message& said,
                                              std::uint32_t device) const;

  gpu_site* site_;
  bool same_process_;
  std::uint32_t pid_;
  mutable std::mutex mutex_;
  std::unordered_map<region_id, record> regions_;
  std::vector<std::pair<region_id, record>> parting_;
};

}  // namespace troupe::transport::xgmi
