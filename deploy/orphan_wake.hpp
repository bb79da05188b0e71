#pragma once

#include <condition_variable>
#include <mutex>
#include <stop_token>
#include <thread>

namespace troupe::deploy {

/// For a process started with `orphan::stops`: while this object lives, the end of the parent also
/// continues the process if it is stopped (SIGSTOP), so that it hears the SIGTERM. The kernel
/// continues such a process by itself only if its new parent belongs to another session, which is
/// not so in a container whose first process is of the same session. Make it when SIGTERM is
/// blocked or handled. Does nothing in a process that was started otherwise.
class orphan_wake {
 public:
  orphan_wake();

 private:
  void watch(const std::stop_token& over);
  std::mutex mutex_;
  std::condition_variable_any ended_;
  std::jthread thread_;
};

}  // namespace troupe::deploy
