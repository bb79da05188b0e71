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
#include "troupe/actors/operation_table.hpp"

namespace troupe::actors {

/// What the engine is told, in order, with a descriptor that is readable while something waits.
/// Written by actors, read by threads of the engine. Nothing is ever dropped, and yet it is bounded:
/// an operation stays open, and takes one of `limits.max_operations` places, until its last event is
/// taken; of each there waits at most one event of every kind, and of layers one for each layer (or
/// twice that before the next merging), since layer events of one operation merge while they wait.
class event_queue {
 public:
  /// Tells `operations` when the last event of one is taken; it must outlive this.
  explicit event_queue(operation_table& operations);
  ~event_queue();
  event_queue(const event_queue&) = delete;
  event_queue& operator=(const event_queue&) = delete;

  void push(event e);
  /// The same for the event that the engine hears last of its operation.
  void push_last(event e);
  [[nodiscard]] std::vector<event> take(std::size_t max);
  [[nodiscard]] std::vector<event> wait(std::chrono::milliseconds timeout, std::size_t max);
  [[nodiscard]] int fd() const noexcept { return fd_; }
  [[nodiscard]] bool empty() const noexcept { return size() == 0; }
  [[nodiscard]] std::size_t size() const noexcept { return count_.load(std::memory_order_acquire); }

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
  struct waiting_event {
    event what;
    bool last{false};  ///< of its operation
  };

  void append(waiting_event e);
  [[nodiscard]] std::vector<event> take_locked(std::size_t max);
  void signal_locked();
  void merge_layers_locked();

  operation_table& operations_;
  mutable std::mutex mutex_;
  std::condition_variable available_;
  std::deque<waiting_event> events_;
  std::size_t merge_at_;
  std::atomic<std::size_t> count_{0};  ///< of `events_`
  std::size_t waiting_{0};
  std::optional<std::thread::id> consumer_;
  int fd_{-1};
  bool signalled_{false};
};

}  // namespace troupe::actors
