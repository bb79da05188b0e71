#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "troupe/transport/xgmi/gate_words.hpp"
#include "troupe/transport/xgmi/gpu_runtime.hpp"
#include "troupe/transport/xgmi/late_calls.hpp"

namespace troupe::transport::xgmi {

/// What names an allocation of another process, opened here for copies by one GPU.
struct allocation_key {
  std::uint32_t pid{0};
  std::uint32_t device{0};  ///< index here, of the GPU that copies
  std::uint64_t id{0};      ///< what the owner's driver knows the allocation by
  memory_handle handle{};

  friend auto operator<=>(const allocation_key&, const allocation_key&) = default;
};

class opened_allocations;

/// An allocation of a peer that is open here. Closed with its last user, so a copy that flies keeps
/// it.
class opened_allocation {
 public:
  opened_allocation(opened_allocations& all, const allocation_key& key, std::byte* base) noexcept
      : all_{&all}, key_{key}, base_{base} {}
  opened_allocation(const opened_allocation&) = delete;
  opened_allocation& operator=(const opened_allocation&) = delete;
  ~opened_allocation();

  [[nodiscard]] std::byte* base() const noexcept { return base_; }

 private:
  opened_allocations* all_;
  allocation_key key_;
  std::byte* base_;
};

/// The peers' allocations that are open in this process, each once, whatever links and regions use
/// it: a driver refuses to open one twice. Thread-safe.
class opened_allocations {
 public:
  opened_allocations(gpu_runtime& runtime, gate_words& gates)
      : runtime_{&runtime}, gates_{&gates} {}
  opened_allocations(const opened_allocations&) = delete;
  opened_allocations& operator=(const opened_allocations&) = delete;
  ~opened_allocations();

  /// Opens the allocation, or finds it open. `size` is what its owner says that it has;
  /// `unauthorized` when it has less. The errors of `gpu_runtime::open_memory`.
  [[nodiscard]] result<std::shared_ptr<const opened_allocation>> open(const allocation_key& key,
                                                                      std::uint64_t size);
  [[nodiscard]] std::size_t size() const;

 private:
  friend class opened_allocation;
  struct left_open {
    allocation_key key;
    std::byte* base{nullptr};
  };

  /// Now, or when no stream of the GPU is held: a driver that closes waits for the whole GPU, and
  /// a stream that is held may wait for the very thread that closes.
  void close(const allocation_key& key, std::byte* base);
  void close_what_can_be();
  void go_on_closing();
  /// One that waits to be closed, for who wants it again.
  [[nodiscard]] std::byte* take_back(const allocation_key& key);

  static constexpr std::chrono::milliseconds look_every{100};

  gpu_runtime* runtime_;
  gate_words* gates_;
  mutable std::mutex mutex_;
  std::mutex closing_mutex_;
  std::condition_variable changed_;
  std::vector<left_open> to_close_;
  bool closing_late_{false};
  bool ending_{false};
  std::map<allocation_key, std::weak_ptr<const opened_allocation>> known_;
  late_calls late_;  ///< ends first
};

}  // namespace troupe::transport::xgmi
