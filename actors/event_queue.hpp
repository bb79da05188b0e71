#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "troupe/actors/engine.hpp"

namespace troupe::actors {

/// What the engine is told, in order, with a descriptor that is readable while something waits.
/// Written by actors, read by threads of the engine. Bounded by the bound on live operations: each
/// has at most a few events, and layer events of one operation merge while they wait.
class event_queue {
 public:
  event_queue();
  ~event_queue();
  event_queue(const event_queue&) = delete;
  event_queue& operator=(const event_queue&) = delete;

  void push(event e);
  [[nodiscard]] std::vector<event> take(std::size_t max);
  [[nodiscard]] std::vector<event> wait(std::chrono::milliseconds timeout, std::size_t max);
  [[nodiscard]] int fd() const noexcept { return fd_; }
  [[nodiscard]] bool empty() const noexcept { return count_.load(std::memory_order_acquire) == 0; }

  /// For a thread that makes progress itself until an event comes, and takes it then: what it
  /// pushes meanwhile need not wake anybody, itself least of all.
  class consumer {
   public:
    explicit consumer(event_queue& queue);
    /// Signals what it has left.
    ~consumer();
    consumer(const consumer&) = delete;
    consumer& operator=(const consumer&) = delete;

   private:
    event_queue& queue_;
  };

 private:
  [[nodiscard]] std::vector<event> take_locked(std::size_t max);
  void signal_locked();

  mutable std::mutex mutex_;
  std::condition_variable available_;
  std::deque<event> events_;
  std::atomic<std::size_t> count_{0};  ///< of `events_`
  std::size_t waiting_{0};
  std::optional<std::thread::id> consumer_;
  int fd_{-1};
  bool signalled_{false};
};

}  // namespace troupe::actors
