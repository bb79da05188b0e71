#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "troupe/transport/xgmi/gpu_runtime.hpp"

namespace troupe::transport::xgmi {

/// What names an allocation of another process, opened here for copies by one GPU.
struct allocation_key {
  std::uint32_t pid{0};
  std::uint32_t device{0};  ///< index here, of the GPU that copies
  std::uint64_t id{0};      ///< what the owner's driver knows the allocation by
  memory_handle handle{};

  friend auto operator<=>(const allocation_key&, const allocation_key&) = default;
};

/// An allocation of a peer that is open here. Closed with its last user, so a copy that flies keeps
/// it.
class opened_allocation {
 public:
  opened_allocation(gpu_runtime& runtime, std::uint32_t device, std::byte* base) noexcept
      : runtime_{&runtime}, device_{device}, base_{base} {}
  opened_allocation(const opened_allocation&) = delete;
  opened_allocation& operator=(const opened_allocation&) = delete;
  ~opened_allocation() { runtime_->close_memory(device_, base_); }

  [[nodiscard]] std::byte* base() const noexcept { return base_; }

 private:
  gpu_runtime* runtime_;
  std::uint32_t device_;
  std::byte* base_;
};

/// The peers' allocations that are open in this process, each once, whatever links and regions use
/// it: a driver refuses to open one twice. Thread-safe.
class opened_allocations {
 public:
  explicit opened_allocations(gpu_runtime& runtime) : runtime_{&runtime} {}

  /// Opens the allocation, or finds it open. `size` is what its owner says that it has;
  /// `unauthorized` when it has less. The errors of `gpu_runtime::open_memory`.
  [[nodiscard]] result<std::shared_ptr<const opened_allocation>> open(const allocation_key& key,
                                                                      std::uint64_t size);
  [[nodiscard]] std::size_t size() const;

 private:
  gpu_runtime* runtime_;
  mutable std::mutex mutex_;
  std::map<allocation_key, std::weak_ptr<const opened_allocation>> known_;
};

}  // namespace troupe::transport::xgmi
