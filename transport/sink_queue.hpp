#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <variant>
#include <vector>

#include "troupe/transport/backend.hpp"
#include "troupe/transport/kept_queue.hpp"

namespace troupe::transport {

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
using sink_event = std::variant<up_event, completion, frame_event, quiescent_event, broken_event>;

/// Serialises the calls of a link's sink: calls from any threads never overlap, keep the order of
/// `put`, and hold no lock. The first thread makes the calls; other threads (and a callback that
/// causes more events) leave their events to it. Without contention an event costs two atomic
/// operations and allocates no memory. Thread-safe.
///
/// | state             | on                    | becomes           |
/// | ----------------- | --------------------- | ----------------- |
/// | idle              | try_begin             | calling           |
/// | idle              | put                   | waiting           |
/// | waiting           | put                   | waiting           |
/// | waiting           | deliver               | calling + waiting |
/// | calling           | put                   | calling + waiting |
/// | calling           | end                   | idle              |
/// | calling + waiting | end, queue drained    | idle              |
class sink_queue {
 public:
  explicit sink_queue(std::shared_ptr<link_sink> sink) : sink_{std::move(sink)} {}

  /// Appends an event without calling the sink. Safe under the link's locks.
  void put(sink_event event);
  /// Calls the sink with every waiting event, unless another thread (or a caller up the stack)
  /// does.
  void deliver();
  /// `put` and `deliver` in one.
  void deliver(sink_event event);
  /// Delivers a frame, without copying it if nobody else is calling.
  void frame(std::span<const std::byte> bytes);

  /// Takes the turn without calling yet; succeeds if no event waits and nobody is calling. Safe
  /// under the link's locks, where it fixes an event as the next one. `end` must follow.
  [[nodiscard]] bool try_begin() noexcept;
  /// Calls the sink with `event`, then with the events that came meanwhile, and ends the turn.
  void end(sink_event event);

  /// The owner closed the link: `on_broken` is no longer called.
  void mute_broken() noexcept { muted_.store(true, std::memory_order_release); }
  /// Frames that wait because another thread is inside a callback. A link that has too many frames
  /// or bytes waiting makes the peer wait.
  [[nodiscard]] std::size_t waiting_frames() const noexcept {
    return waiting_frames_.load(std::memory_order_relaxed);
  }
  [[nodiscard]] std::size_t waiting_bytes() const noexcept {
    return waiting_bytes_.load(std::memory_order_relaxed);
  }

 private:
  static constexpr std::uint32_t calling = 1;
  static constexpr std::uint32_t waiting = 2;

  void call(sink_event& event);
  void end_turn();
  void call_rest();

  const std::shared_ptr<link_sink> sink_;
  std::atomic<std::uint32_t> state_{0};
  std::mutex mutex_;  ///< guards the waiting events
  kept_queue<sink_event> events_;
  std::atomic<std::size_t> waiting_frames_{0};
  std::atomic<std::size_t> waiting_bytes_{0};
  std::atomic<bool> muted_{false};
};

}  // namespace troupe::transport
