#pragma once

#include <condition_variable>
#include <mutex>
#include <stop_token>
#include <thread>

namespace troupe::deploy {

/// For a process that was started with `orphan::stops`: while this lives, the end of its parent also
/// continues it where it stands still (SIGSTOP), so that it hears the SIGTERM. The kernel continues
/// such a process by itself only where whoever inherits it belongs to another session, and not, for
/// one, in a container whose first process is of the same session. Make it when SIGTERM is blocked or
/// handled. Does nothing in a process that was started otherwise.
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
