#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <variant>
#include <vector>

#include "troupe/transport/backend.hpp"

namespace troupe::transport::shm {

struct up_event {};
struct frame_event {
  std::vector<std::byte> bytes;
};
struct quiescent_event {
  transfer_id transfer;
};
struct broken_event {
  troupe::error why;
};
using link_event = std::variant<up_event, completion, frame_event, quiescent_event, broken_event>;

/// Calls a sink from whichever thread has something to say, one call at a time, in the order of
/// `put`, without a lock held. A thread that finds another one calling leaves its event to that
/// one.
class event_queue {
 public:
  explicit event_queue(std::shared_ptr<link_sink> sink) : sink_{std::move(sink)} {}

  /// Appends without calling. Safe under the link's lock.
  void put(link_event event);
  /// Calls the sink with everything that waits, unless another thread (or a caller up the stack)
  /// does.
  void deliver();
  /// `put` and `deliver` in one, without touching the queue when nothing else is going on.
  void deliver(link_event event);
  /// Frames that wait for a slow sink; the link stops to read the ring at a bound.
  [[nodiscard]] std::size_t waiting() const;

 private:
  void call(link_event& event);
  void run(std::unique_lock<std::mutex>& lock);

  const std::shared_ptr<link_sink> sink_;
  mutable std::mutex mutex_;
  std::deque<link_event> events_;
  bool calling_{false};
};

}  // namespace troupe::transport::shm
