#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "troupe/actors/engine_types.hpp"
#include "troupe/actors/operations/member_watch.hpp"
#include "troupe/actors/operations/operation_table.hpp"
#include "troupe/actors/operations/waiting_events.hpp"
#include "troupe/kvcache/result.hpp"

namespace troupe::actors {

/// The engine's events in order, with a descriptor that is readable while events wait. Written by
/// actors, read by threads of the engine. No event is dropped, and yet the queue is bounded: an
/// operation stays open, and takes one of `limits.max_operations` places, until its last event is
/// taken. Of each operation at most one event of every kind waits, except layer events (one for
/// each layer, or twice that before the next merging: they merge while they wait) and, of a send,
/// one event for each node that wants it. Events of members belong to no operation and wait apart,
/// before those of operations: `member_watch` bounds them by the names of the cluster.
///
/// Every event is taken once. A thread that waits for one operation owns its events (`claim`):
/// `take`, `wait` and the descriptor do not see them. The thread either takes them all or gives the
/// claim up; then `take` returns them first. A call that finds no memory has neither added nor taken
/// an event.
class event_queue {
 public:
  class claim;

  /// Tells `operations` when the last event of an operation is taken; `operations` must outlive the
  /// queue. Throws `std::system_error` if it gets no descriptor.
  explicit event_queue(operation_table& operations);
  ~event_queue();
  event_queue(const event_queue&) = delete;
  event_queue& operator=(const event_queue&) = delete;

  void push(event e);
  /// Same, for the last event of an operation.
  void push_last(event e);
  /// Ends a live operation and adds its outcome, the last event unless `unpinned` follows: both, or
  /// neither if memory runs out. Returns false, and drops the outcome, if it has ended already.
  bool conclude(event outcome, bool last = true);
  [[nodiscard]] std::vector<event> take(std::size_t max);
  [[nodiscard]] std::vector<event> wait(std::chrono::milliseconds timeout, std::size_t max);
  /// `not_found`: no such operation is open, or `take` returned its outcome; `already_exists`:
  /// another thread waits for it.
  [[nodiscard]] result<std::unique_ptr<claim>> claim_events(operation_id operation);
  /// Makes the engine hear of the cluster's members, except `self`. Before the first `see`.
  void watch_members(std::string self);
  /// Takes a list that a supervisor published; its changes become events. No effect unless members
  /// are watched.
  void see(const membership& list);
  /// The engine stops: no more events of members, not even those that wait.
  void end_watch();
  /// No actor is left to end operations: none begins any more, the live ones fail with `failure`,
  /// and threads that wait for operations whose last event will not come get `unending`. The first
  /// reasons stay. Events may still be taken. If memory is short, the outcomes that found none come
  /// with a later call that takes events.
  void close(troupe::error failure, troupe::error unending) noexcept;
  [[nodiscard]] int fd() const noexcept { return fd_; }
  /// Of the events that `take` may return.
  [[nodiscard]] bool empty() const noexcept { return size() == 0; }
  [[nodiscard]] std::size_t size() const noexcept { return count_.load(std::memory_order_acquire); }

  /// For a thread that makes progress itself until an event comes, and then takes it: events that
  /// it pushes meanwhile need not wake any thread, least of all itself.
  class consumer {
   public:
    explicit consumer(event_queue& queue);
    /// Signals the events that are left.
    ~consumer();
    consumer(const consumer&) = delete;
    consumer& operator=(const consumer&) = delete;

   private:
    event_queue& queue_;
  };

 private:
  struct reasons {
    troupe::error failure, unending;
  };

  void append(waiting_event e);
  [[nodiscard]] bool conclude_locked(event outcome, bool last);
  /// Gives the operations that were live at the end their outcomes, as far as there is memory.
  void pay_outcomes_locked();
  /// The events that may be taken have changed. Returns whether a waiting thread has to be woken.
  [[nodiscard]] bool show_locked();
  /// Moves the oldest events to `into`, which has room for them.
  void take_locked(waiting_events& from, std::size_t count, std::vector<event>& into);
  [[nodiscard]] std::vector<event> take_unclaimed_locked(std::size_t max);
  void end_claim(claim& of);
  void publish_count_locked();
  void signal_locked();
  void drain_locked();

  operation_table& operations_;
  mutable std::mutex mutex_;
  std::condition_variable available_;
  waiting_events events_;                ///< unclaimed
  std::optional<member_watch> members_;  ///< empty: members are not watched
  /// Of `events_` and `members_`; one more while outcomes are owed, so that they are asked for.
  std::atomic<std::size_t> count_{0};
  std::unordered_map<operation_id, claim*> claims_;
  /// Open operations whose outcome `take` returned: nobody can wait for them any more.
  std::unordered_set<operation_id> outcome_taken_;
  std::optional<reasons> closed_;
  bool owes_outcomes_{false};  ///< since it was closed
  std::size_t waiting_{0};
  std::optional<std::thread::id> consumer_;
  int fd_{-1};
  bool signalled_{false};
};

/// The events of one operation, kept for the thread that waits for its end. Used by that thread.
class event_queue::claim {
 public:
  claim(event_queue& queue, operation_id operation);
  /// Events that were not taken go back to the queue.
  ~claim();
  claim(const claim&) = delete;
  claim& operator=(const claim&) = delete;

  /// Whether the last event has come, or will never come. Cheap.
  [[nodiscard]] bool is_over() const noexcept { return over_.load(std::memory_order_acquire); }
  void wait_until(std::chrono::steady_clock::time_point until);
  /// Readable once the operation is over, if another thread noticed that.
  [[nodiscard]] int fd() const noexcept { return fd_; }
  /// All events of the operation, oldest first. Empty if it goes on; an error if its end will not
  /// come.
  [[nodiscard]] std::optional<result<std::vector<event>>> take();

 private:
  friend event_queue;

  void end_locked();
  [[nodiscard]] bool has_last() const { return events_.has_last(operation_); }

  event_queue& queue_;
  const operation_id operation_;
  const std::thread::id thread_{std::this_thread::get_id()};
  const int fd_;
  waiting_events events_;
  std::atomic<bool> over_{false};
  std::condition_variable ended_;
};

}  // namespace troupe::actors
