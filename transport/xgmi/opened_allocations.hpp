#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "troupe/transport/xgmi/gate_words.hpp"
#include "troupe/transport/xgmi/gpu_runtime.hpp"

namespace troupe::transport::xgmi {

/// Identifies an allocation of another process that is opened here for copies by one GPU.
struct allocation_key {
  std::uint32_t pid{0};
  std::uint32_t device{0};  ///< index, in this process, of the GPU that copies
  std::uint64_t id{0};      ///< the owner's driver's id of the allocation
  memory_handle handle{};

  friend auto operator<=>(const allocation_key&, const allocation_key&) = default;
};

class opened_allocations;

/// A peer's allocation that is open here. A copy in flight keeps it open. When its last user ends
/// it is queued for closing, so no thread that ends a use waits for a driver.
class opened_allocation {
 public:
  opened_allocation(opened_allocations& all, const allocation_key& key, std::byte* base,
                    std::uint64_t use) noexcept
      : all_{&all}, key_{key}, base_{base}, use_{use} {}
  opened_allocation(const opened_allocation&) = delete;
  opened_allocation& operator=(const opened_allocation&) = delete;
  ~opened_allocation();

  [[nodiscard]] std::byte* base() const noexcept { return base_; }

 private:
  opened_allocations* all_;
  allocation_key key_;
  std::byte* base_;
  std::uint64_t use_;
};

/// The peers' allocations that are open in this process. Each is opened once for all links and
/// regions that use it, since a driver refuses to open an allocation twice. Thread-safe.
///
/// | allocation | on                             | becomes |
/// | ---------- | ------------------------------ | ------- |
/// | unknown    | open                           | opening |
/// | opening    | the driver has opened it       | used    |
/// | opening    | the driver refuses             | unknown |
/// | used       | the end of its last user       | left    |
/// | left       | open                           | used    |
/// | left       | no stream of its GPU is held   | closing |
/// | closing    | the driver has closed it       | unknown |
///
/// `open` waits while the allocation is opening or closing. To close, a driver waits for all work
/// given to the GPU. A thread of this class therefore closes, and only while no stream of the GPU
/// is held: a held stream might be waiting for the very thread that waits for the close.
class opened_allocations {
 public:
  opened_allocations(gpu_runtime& runtime, gate_words& gates)
      : runtime_{&runtime}, gates_{&gates} {}
  opened_allocations(const opened_allocations&) = delete;
  opened_allocations& operator=(const opened_allocations&) = delete;
  /// Closes what is left, except on GPUs with a held stream, where the end of the process does.
  ~opened_allocations();

  /// Opens the allocation, or finds it open. `size` is the size that its owner claims.
  /// `unauthorized`: it is smaller; the errors of `gpu_runtime::open_memory`.
  [[nodiscard]] result<std::shared_ptr<const opened_allocation>> open(const allocation_key& key,
                                                                      std::uint64_t size);
  /// Calls `then` once the driver has closed the allocation for every GPU for which it is now
  /// without users; at once if there is none. If it is used again before, its new user must report
  /// the close. `then` may be called by the closing thread, and must not wait.
  void after_closing(const allocation_key& of, std::function<void()> then);
  /// The number of allocations in use.
  [[nodiscard]] std::size_t size() const;

 private:
  friend class opened_allocation;
  /// Its destruction notifies a caller that waits for a close.
  using waiter = std::shared_ptr<const void>;
  struct entry {
    std::byte* base{nullptr};
    std::uint64_t size{0};  ///< as reported by the driver
    std::weak_ptr<const opened_allocation> user;
    std::uint64_t use{0};     ///< number of the latest user; the end of earlier users is ignored
    bool with_driver{false};  ///< opening or closing
    std::vector<waiter> waiters;
  };

  [[nodiscard]] std::shared_ptr<const opened_allocation> use(const allocation_key& key,
                                                             entry& what);
  void leave(const allocation_key& key, std::uint64_t use);
  void go_on_closing();
  void close_what_can_be(std::unique_lock<std::mutex>& lock);

  /// How often to check whether a stream is still held, which may take as long as a transfer.
  static constexpr std::chrono::milliseconds look_every{20};

  gpu_runtime* runtime_;
  gate_words* gates_;
  mutable std::mutex mutex_;  ///< not held during driver calls
  std::condition_variable changed_;
  std::map<allocation_key, entry> known_;
  std::vector<allocation_key> left_;
  std::uint64_t last_use_{0};
  bool ending_{false};
  std::thread closer_;  ///< started when the first allocation is left
};

}  // namespace troupe::transport::xgmi
