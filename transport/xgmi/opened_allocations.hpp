#pragma once

#include <array>
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

/// What names an allocation of another process, opened here for copies by one GPU.
struct allocation_key {
  std::uint32_t pid{0};
  std::uint32_t device{0};  ///< index here, of the GPU that copies
  std::uint64_t id{0};      ///< what the owner's driver knows the allocation by
  memory_handle handle{};

  friend auto operator<=>(const allocation_key&, const allocation_key&) = default;
};

class opened_allocations;

/// An allocation of a peer that is open here. With its last user it is left to be closed, so a copy
/// that flies keeps it, and no thread that ends a use waits for a driver.
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

/// The peers' allocations that are open in this process, each once, whatever links and regions use
/// it: a driver refuses to open one twice. Thread-safe.
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
/// Who opens one that is opening or closing waits for the driver. A driver that closes waits for all
/// that the GPU was given, so one thread of this class does that, and only while no stream of the GPU
/// is held: that might wait for whoever waits for the close.
class opened_allocations {
 public:
  opened_allocations(gpu_runtime& runtime, gate_words& gates)
      : runtime_{&runtime}, gates_{&gates} {}
  opened_allocations(const opened_allocations&) = delete;
  opened_allocations& operator=(const opened_allocations&) = delete;
  /// Closes what is left, but where a stream is held: the end of the process does.
  ~opened_allocations();

  /// Opens the allocation, or finds it open. `size` is what its owner says that it has;
  /// `unauthorized` when it has less. The errors of `gpu_runtime::open_memory`.
  [[nodiscard]] result<std::shared_ptr<const opened_allocation>> open(const allocation_key& key,
                                                                      std::uint64_t size);
  /// Calls `then` once the driver has closed what of that allocation is left now, for whichever GPU
  /// it was open; at once where nothing is. Of one that is used again before, its new user has to
  /// say that it is closed. `then` may be called by the thread that closes, and must not wait.
  void after_closing(const allocation_key& of, std::function<void()> then);
  /// How many are used.
  [[nodiscard]] std::size_t size() const;

 private:
  friend class opened_allocation;
  /// Its end tells somebody who waits for a close.
  using waiter = std::shared_ptr<const void>;
  struct entry {
    std::byte* base{nullptr};
    std::uint64_t size{0};  ///< as the driver says
    std::weak_ptr<const opened_allocation> user;
    std::uint64_t use{0};     ///< of the last user: one that ends later than it is not heard
    bool with_driver{false};  ///< opening or closing
    std::vector<waiter> waiters;
  };

  [[nodiscard]] std::shared_ptr<const opened_allocation> use(const allocation_key& key,
                                                             entry& what);
  void leave(const allocation_key& key, std::uint64_t use);
  void go_on_closing();
  void close_what_can_be(std::unique_lock<std::mutex>& lock);

  /// Streams are held for as long as a transfer takes: how often to look whether one still is.
  static constexpr std::chrono::milliseconds look_every{20};

  gpu_runtime* runtime_;
  gate_words* gates_;
  mutable std::mutex mutex_;  ///< not held during calls of a driver
  std::condition_variable changed_;
  std::map<allocation_key, entry> known_;
  std::vector<allocation_key> left_;
  std::uint64_t last_use_{0};
  bool ending_{false};
  std::thread closer_;  ///< from the first that is left on
};

}  // namespace troupe::transport::xgmi
