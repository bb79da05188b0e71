#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace troupe::transport::xgmi {

/// Makes driver calls that may wait for all work given to a GPU, namely those that close or free
/// memory. A thread of its own makes them one after the other, since the GPU's work may itself wait
/// for a progress thread. Thread-safe.
class late_calls {
 public:
  late_calls() = default;
  late_calls(const late_calls&) = delete;
  late_calls& operator=(const late_calls&) = delete;
  /// Returns after all calls have been made.
  ~late_calls();

  void give(std::function<void()> call);

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> calls_;
  bool ending_{false};
  std::thread thread_;  ///< started by the first call
};

}  // namespace troupe::transport::xgmi
