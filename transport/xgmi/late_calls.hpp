#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace troupe::transport::xgmi {

/// Calls of a driver that may wait for all that a GPU was given: those that close or free memory.
/// Made one after the other by a thread of their own, since what a GPU was given may itself wait for
/// a progress thread. Thread-safe.
class late_calls {
 public:
  late_calls() = default;
  late_calls(const late_calls&) = delete;
  late_calls& operator=(const late_calls&) = delete;
  /// Returns when all are made.
  ~late_calls();

  void give(std::function<void()> call);

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> calls_;
  bool ending_{false};
  std::thread thread_;  ///< from the first call on
};

}  // namespace troupe::transport::xgmi
