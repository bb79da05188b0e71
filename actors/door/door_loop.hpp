#pragma once

#include <cerrno>
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

/// Whether a call on a non-blocking descriptor failed with an errno that says to try it later.
[[nodiscard]] constexpr bool not_now(int number) noexcept {
  return number == EAGAIN || number == EWOULDBLOCK || number == EINTR;
}

/// The event loop of a door's one thread: descriptors, timers, and calls posted by other threads.
/// Only functions marked thread-safe may be called from other threads. Callbacks must not block.
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

  /// Called with exceptions that escape a call, on the loop's thread; set before `run`. The loop
  /// continues after such a call.
  void on_exception(std::function<void(const std::string& what)> tell) { tell_ = std::move(tell); }
  /// Runs until `stop`. Handles no signals: they are left to the other threads of the process.
  void run();
  /// Thread-safe. Allocates nothing: destructors call it.
  void stop() noexcept;
  /// Thread-safe. Calls run in the order of the posts, on the loop's thread.
  void post(call what);
  /// Runs the calls posted so far.
  void run_posted();
  [[nodiscard]] bool on_its_thread() const noexcept;

  /// Calls `what` while one of `events` (EPOLLIN, ...) holds (level-triggered); EPOLLERR and
  /// EPOLLHUP are always reported. Returns 0 on failure.
  [[nodiscard]] id watch(int fd, std::uint32_t events, events_call what);
  void change(id watched, std::uint32_t events);
  /// Must be called before the descriptor is closed. Does nothing for 0.
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

  mutable std::mutex mutex_;  // guards the members below
  std::vector<call> posted_;
  bool stopped_{false};
  std::thread::id thread_;
};

}  // namespace troupe::actors
