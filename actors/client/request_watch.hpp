#pragma once

/// What a `request_carrier` has besides its requests: the newest membership, and threads for what must
/// not hold a request up.

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

/// Looks at the membership ten times a second while a request is being carried. Thread-safe.
class request_watch {
 public:
  explicit request_watch(cluster_client& client);
  ~request_watch();
  request_watch(const request_watch&) = delete;
  request_watch& operator=(const request_watch&) = delete;

  void begin();
  void end();
  /// Never null; empty unless a supervisor has answered what was asked after that.
  [[nodiscard]] std::shared_ptr<const membership> asked_after(
      std::chrono::steady_clock::time_point then) const;
  /// The supervisor could not be told that a request is over: it is told again once it answers.
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
  std::chrono::steady_clock::time_point asked_{};  ///< for the newest
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

  /// Throws `std::system_error` when there is no thread to be had.
  void run(std::function<void()> what);

 private:
  struct one {
    std::jthread thread;  ///< joined where it goes, also when the next one cannot be had
    bool ended{false};
  };
  std::mutex mutex_;
  std::list<one> all_;
};

}  // namespace troupe::actors
