#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "troupe/kvcache/result.hpp"
#include "troupe/transport/owned_fd.hpp"

namespace troupe::actors {

using transport::owned_fd;

/// The one thread of a door: descriptors, times, and calls from elsewhere. Everything that is not
/// said to be thread-safe is for its own thread. What it calls must not block.
class door_loop {
 public:
  using clock = std::chrono::steady_clock;
  using call = std::function<void()>;
  using events_call = std::function<void(std::uint32_t events)>;
  using id = std::uint64_t;  ///< 0: none

  [[nodiscard]] static result<std::unique_ptr<door_loop>> create();
  door_loop(const door_loop&) = delete;
  door_loop& operator=(const door_loop&) = delete;
  ~door_loop() = default;

  /// Told of exceptions that escaped a call, on the loop's thread; set before `run`. The call that
  /// threw is over, the loop goes on.
  void on_exception(std::function<void(const std::string& what)> tell) { tell_ = std::move(tell); }
  /// Until `stop`. All signals are for the other threads of the process.
  void run();
  /// Thread-safe. Needs no memory: destructors call it.
  void stop() noexcept;
  /// Thread-safe. Calls run in the order of the posts, on the loop's thread.
  void post(call what);
  /// Runs what was posted so far.
  void run_posted();
  [[nodiscard]] bool on_its_thread() const noexcept;

  /// Calls with EPOLLIN and so on while they hold (level-triggered), EPOLLERR and EPOLLHUP always.
  [[nodiscard]] id watch(int fd, std::uint32_t events, events_call what);
  void change(id watched, std::uint32_t events);
  /// Before the descriptor is closed. Nothing happens with 0.
  void forget(id& watched);

  /// Calls once, not before `when`.
  [[nodiscard]] id call_at(clock::time_point when, call what);
  void cancel(id& timer);

 private:
  struct watched {
    int fd;
    std::uint32_t events;
    events_call what;
  };

  door_loop(owned_fd epoll, owned_fd wake);
  void wake() const noexcept;
  [[nodiscard]] int wait_ms() const;
  void run_due();
  template <class Call>
  void guarded(const Call& what) const noexcept;

  std::function<void(const std::string&)> tell_;
  owned_fd epoll_, wake_;
  id last_id_{0};
  std::unordered_map<id, std::shared_ptr<watched>> watched_;
  std::map<std::pair<clock::time_point, id>, call> timers_;
  std::unordered_map<id, clock::time_point> timer_times_;

  mutable std::mutex mutex_;  // of what follows
  std::vector<call> posted_;
  bool stopped_{false};
  std::thread::id thread_;
};

}  // namespace troupe::actors
