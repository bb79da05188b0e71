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

/// Calls a link's sink so that calls never overlap, whatever threads they come from, in the order
/// of `put`, and with no lock held. The thread that finds nobody calling calls; the others (and a
/// callback that causes more) leave their event to it. When nobody else is about, an event costs
/// two atomic operations and no memory. Thread-safe.
///
/// | state             | on                    | becomes           |
/// | ----------------- | --------------------- | ----------------- |
/// | idle              | try_begin             | calling           |
/// | idle              | put                   | waiting           |
/// | waiting           | put                   | waiting           |
/// | waiting           | deliver               | calling + waiting |
/// | calling           | put                   | calling + waiting |
/// | calling           | end                   | idle              |
/// | calling + waiting | end, the last is told | idle              |
class sink_queue {
 public:
  explicit sink_queue(std::shared_ptr<link_sink> sink) : sink_{std::move(sink)} {}

  /// Appends without calling. Safe under the link's locks.
  void put(sink_event event);
  /// Calls the sink with everything that waits, unless another thread (or a caller up the stack)
  /// does.
  void deliver();
  /// `put` and `deliver` in one.
  void deliver(sink_event event);
  /// The same for a frame, without a copy where nobody else is calling.
  void frame(std::span<const std::byte> bytes);

  /// Takes the turn, without calling yet: true when nothing waits and nobody calls. Safe under the
  /// link's locks, and so the way to say there that an event is the next one; `end` must follow.
  [[nodiscard]] bool try_begin() noexcept;
  /// Calls with `event`, then with what came meanwhile, and gives the turn back.
  void end(sink_event event);

  /// From now on `on_broken` is not called any more: the owner closed the link.
  void mute_broken() noexcept { muted_.store(true, std::memory_order_release); }
  /// Frames that wait because another thread is inside a callback; a link that sees too many or too
  /// much of them lets the peer wait.
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
  std::mutex mutex_;  ///< of the events that wait
  kept_queue<sink_event> events_;
  std::atomic<std::size_t> waiting_frames_{0};
  std::atomic<std::size_t> waiting_bytes_{0};
  std::atomic<bool> muted_{false};
};

}  // namespace troupe::transport
