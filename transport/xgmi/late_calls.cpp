#include "troupe/transport/xgmi/late_calls.hpp"

#include <system_error>
#include <utility>

namespace troupe::transport::xgmi {

late_calls::~late_calls() {
  {
    const std::lock_guard lock{mutex_};
    ending_ = true;
  }
  changed_.notify_one();
  if (thread_.joinable()) thread_.join();
}

void late_calls::give(std::function<void()> call) {
  {
    const std::lock_guard lock{mutex_};
    try {
      if (!thread_.joinable()) thread_ = std::thread{[this] { run(); }};
      calls_.push_back(std::move(call));
      call = {};
    } catch (const std::system_error&) {
      // No thread available: make the call here, even if it waits.
    }
  }
  if (call) {
    call();
  } else {
    changed_.notify_one();
  }
}

void late_calls::run() {
  std::unique_lock lock{mutex_};
  while (true) {
    changed_.wait(lock, [&] { return ending_ || !calls_.empty(); });
    if (calls_.empty()) return;
    auto next = std::move(calls_.front());
    calls_.pop_front();
    lock.unlock();
    next();
    next = {};  // destroy what it holds before taking the lock
    lock.lock();
  }
}

}  // namespace troupe::transport::xgmi
