#pragma once

#include <chrono>
#include <csignal>
#include <future>
#include <utility>

namespace troupe::deploy::cli {

/// SIGINT, SIGTERM and SIGHUP as a descriptor to poll instead of an interruption. Make it before
/// any other thread: threads inherit the blocked signals from the one that makes them.
class stop_signals {
 public:
  /// Throws `std::system_error` if they cannot be watched: a process that cannot be stopped must
  /// not begin.
  stop_signals();
  ~stop_signals();
  stop_signals(const stop_signals&) = delete;
  stop_signals& operator=(const stop_signals&) = delete;

  /// Readable while a signal waits.
  [[nodiscard]] int fd() const noexcept { return fd_; }
  /// Waits for a signal, at most `timeout` (negative: for ever), and consumes it. Returns false if
  /// none came.
  [[nodiscard]] bool wait(std::chrono::milliseconds timeout) noexcept;
  /// From now on such a signal ends the process at once, for a user who does not want to wait for a
  /// clean end.
  void restore() noexcept;

 private:
  sigset_t watched_{};
  sigset_t before_{};
  int fd_{-1};
};

/// Runs `work`, which may wait for peers, on a thread of its own and listens for signals meanwhile.
/// At the first signal it calls `on_signal`, waits for `work` and returns false; from then on
/// another signal ends the process at once. Returns true if no signal came.
template <class Work, class OnSignal>
[[nodiscard]] bool run_and_listen(stop_signals& signals, Work work, OnSignal on_signal) {
  using std::chrono::milliseconds;
  auto done = std::async(std::launch::async, std::move(work));
  while (done.wait_for(milliseconds{0}) != std::future_status::ready) {
    if (!signals.wait(milliseconds{10})) continue;
    on_signal();
    signals.restore();
    done.get();
    return false;
  }
  done.get();
  return true;
}

}  // namespace troupe::deploy::cli
