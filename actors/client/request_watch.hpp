#pragma once

/// Helpers of `request_carrier`: the newest membership, and threads for work that must not delay a
/// request.

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "troupe/actors/cluster_client.hpp"

namespace troupe::actors {

/// Fetches the membership ten times a second while a request is being carried. Thread-safe.
class request_watch {
 public:
  explicit request_watch(cluster_client& client);
  ~request_watch();
  request_watch(const request_watch&) = delete;
  request_watch& operator=(const request_watch&) = delete;

  void begin();
  void end();
  /// The newest membership if it was asked for after `then`, otherwise an empty one. Never null.
  [[nodiscard]] std::shared_ptr<const membership> asked_after(
      std::chrono::steady_clock::time_point then) const;
  /// Tells the supervisor that a request is over once the supervisor answers again.
  void tell_later(std::string request);

 private:
  void run();
  void tell_now(std::unique_lock<std::mutex>& lock);

  cluster_client& client_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::uint32_t requests_{0};
  bool stopping_{false};
  std::shared_ptr<const membership> newest_{std::make_shared<membership>()};
  std::chrono::steady_clock::time_point asked_{};  ///< when `newest_` was asked for
  std::deque<std::string> untold_;                 ///< requests that are over
  std::thread thread_;
};

/// Threads that end by themselves; the destructor waits for them. Thread-safe.
class side_threads {
 public:
  side_threads() = default;
  ~side_threads();
  side_threads(const side_threads&) = delete;
  side_threads& operator=(const side_threads&) = delete;

  /// Throws `std::system_error` if no thread can be started.
  void run(std::function<void()> what);

 private:
  struct one {
    std::jthread thread;  ///< joined on destruction, even if starting the next one fails
    bool ended{false};
  };
  std::mutex mutex_;
  std::list<one> all_;
};

}  // namespace troupe::actors
