#include "troupe/transport/sink_queue.hpp"

#include <utility>

#include "troupe/kvcache/overloaded.hpp"

namespace troupe::transport {

void sink_queue::put(sink_event event) {
  const std::lock_guard lock{mutex_};
  if (const auto* frame = std::get_if<frame_event>(&event)) {
    waiting_frames_.fetch_add(1, std::memory_order_relaxed);
    waiting_bytes_.fetch_add(frame->bytes.size(), std::memory_order_relaxed);
  }
  events_.push_back(std::move(event));
  state_.fetch_or(waiting, std::memory_order_release);
}

bool sink_queue::try_begin() noexcept {
  std::uint32_t idle = 0;
  return state_.compare_exchange_strong(idle, calling, std::memory_order_acquire,
                                        std::memory_order_relaxed);
}

void sink_queue::end(sink_event event) {
  call(event);
  end_turn();
}

void sink_queue::deliver() {
  std::uint32_t only_waiting = waiting;
  if (state_.load(std::memory_order_relaxed) != waiting) return;  // no event, or another caller
  if (state_.compare_exchange_strong(only_waiting, calling | waiting, std::memory_order_acquire)) {
    call_rest();
  }
}

void sink_queue::deliver(sink_event event) {
  if (try_begin()) {
    end(std::move(event));
  } else {
    put(std::move(event));
    deliver();
  }
}

void sink_queue::frame(std::span<const std::byte> bytes) {
  if (try_begin()) {
    sink_->on_frame(bytes);
    end_turn();
  } else {
    put(frame_event{{bytes.begin(), bytes.end()}});
    deliver();
  }
}

void sink_queue::end_turn() {
  std::uint32_t alone = calling;
  if (!state_.compare_exchange_strong(alone, 0, std::memory_order_release,
                                      std::memory_order_acquire)) {
    call_rest();
  }
}

/// Runs in the caller's turn, and ends that turn.
void sink_queue::call_rest() {
  while (true) {
    std::unique_lock lock{mutex_};
    if (events_.empty()) {
      state_.store(0, std::memory_order_release);  // `put` changes it under this lock only
      return;
    }
    auto next = std::move(events_.front());
    events_.pop_front();
    lock.unlock();
    call(next);
    if (const auto* frame = std::get_if<frame_event>(&next)) {
      waiting_frames_.fetch_sub(1, std::memory_order_relaxed);
      waiting_bytes_.fetch_sub(frame->bytes.size(), std::memory_order_relaxed);
    }
  }
}

void sink_queue::call(sink_event& event) {
  std::visit(overloaded{[&](up_event) { sink_->on_up(); },
                        [&](completion& done) { sink_->on_completion(std::move(done)); },
                        [&](frame_event& frame) { sink_->on_frame(frame.bytes); },
                        [&](quiescent_event q) { sink_->on_quiescent(q.transfer); },
                        [&](broken_event& b) {
                          if (!muted_.load(std::memory_order_acquire)) {
                            sink_->on_broken(std::move(b.why));
                          }
                        }},
             event);
}

}  // namespace troupe::transport
