#pragma once

#include <atomic>
#include <csignal>
#include <functional>
#include <thread>

namespace troupe::deploy {

/// Turns SIGINT and SIGTERM into a call on a thread of its own, for the life of the object. Make it
/// before any other thread: threads inherit the blocked signals from the one that makes them.
class interrupt_watch {
 public:
  /// `on_interrupt` is called at every such signal.
  explicit interrupt_watch(std::function<void()> on_interrupt);
  ~interrupt_watch();
  interrupt_watch(const interrupt_watch&) = delete;
  interrupt_watch& operator=(const interrupt_watch&) = delete;

  [[nodiscard]] bool interrupted() const noexcept { return interrupted_; }

 private:
  void run();
  std::function<void()> on_interrupt_;
  std::atomic<bool> interrupted_{false};
  std::atomic<bool> over_{false};
  sigset_t watched_{};
  sigset_t before_{};
  std::thread thread_;
};

}  // namespace troupe::deploy
