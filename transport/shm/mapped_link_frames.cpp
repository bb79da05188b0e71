#include <string>
#include <utility>

#include <sys/eventfd.h>

#include "troupe/transport/batch_check.hpp"
#include "troupe/transport/shm/mapped_link.hpp"

// Session frames, both ways.

namespace troupe::transport::shm {

namespace {

/// Frames taken out of the ring in one round, and frames that may wait for a slow sink.
constexpr int frames_per_round = 64;
constexpr std::size_t max_waiting_frames = 1024;
/// How much memory the frame buffer keeps once frames are short again.
constexpr std::size_t kept_frame_bytes = std::size_t{64} << 10;

}  // namespace

result<void> mapped_link::send_frame(std::span<const std::byte> frame) {
  if (auto ok = check_frame(frame.size()); !ok) return ok;
  const std::lock_guard lock{mutex_};
  if (state_ != link_phase::up) return not_up(kind_, state_, why_broken_);
  if (auto ok = check_frame_room(frame.size()); !ok) return ok;
  put_frame(frame);
  return {};
}

/// Under the lock.
result<void> mapped_link::check_frame_room(std::size_t bytes) const {
  const auto waiting = waiting_bytes_ + reserved_bytes_;
  if (waiting + bytes <= options_.max_queued_frame_bytes) return {};
  return fail(errc::overloaded,
              "the peer does not take frames: " + std::to_string(waiting) + " bytes wait");
}

/// Under the lock: puts the frame into the ring, or behind the frames that wait for room.
void mapped_link::put_frame(std::span<const std::byte> frame) {
  ledger_.frame_sent();
  if (waiting_frames_.empty()) {
    const auto pushed = producer_->push(frame);
    if (pushed && *pushed) {
      if (producer_->must_wake_consumer()) ring_peer();
      return;
    }
  }
  waiting_bytes_ += frame.size();
  waiting_frames_.emplace_back(frame.begin(), frame.end());
  flush_frames();
}

/// Under the lock: fills the ring from the waiting frames.
void mapped_link::flush_frames() {
  if (waiting_frames_.empty()) return;
  bool wake = false;
  while (!waiting_frames_.empty()) {
    auto& front = waiting_frames_.front();
    const auto before = front_done_;
    auto done = front.empty() ? result<std::size_t>{0} : producer_->push_part(front, front_done_);
    if (front.empty()) {
      const auto pushed = producer_->push(front);
      if (!pushed) done = fail(pushed.error());
      if (pushed && !*pushed) {
        if (producer_->wait_for_room()) continue;
        break;
      }
      wake = true;
    }
    if (!done) {
      if (!ending_) {
        ending_ = ending{done.error(), false};
        engine_.wake();  // it may sleep, and must end the link
      }
      break;
    }
    front_done_ = *done;
    wake = wake || front_done_ != before;
    if (front_done_ < front.size()) {
      if (producer_->wait_for_room()) continue;
      break;
    }
    waiting_bytes_ -= front.size();
    front_done_ = 0;
    waiting_frames_.pop_front();
  }
  if (wake && producer_->must_wake_consumer()) ring_peer();
  if (!waiting_frames_.empty()) attention_.store(true, std::memory_order_release);
}

/// Returns whether it delivered a frame.
bool mapped_link::drain_frames() {
  if (!consumer_->ready() || reading_.exchange(true, std::memory_order_acquire)) return false;
  int taken = 0;
  std::optional<troupe::error> nonsense;
  while (taken < frames_per_round && up_.load(std::memory_order_acquire) &&
         sink_.waiting_frames() < max_waiting_frames) {
    auto popped = consumer_->pop(frame_);
    if (!popped) {
      nonsense = std::move(popped).error();
      break;
    }
    if (!*popped) break;
    ++taken;
    ledger_.frame_received();
    sink_.frame(frame_);
  }
  if (frame_.capacity() > kept_frame_bytes) frame_ = {};
  // Taking parts of a long frame makes room even if no frame is complete.
  const bool room_wanted = consumer_->must_wake_producer();
  reading_.store(false, std::memory_order_release);
  if (room_wanted) {
    const std::lock_guard lock{mutex_};
    ring_peer();
  }
  if (nonsense) break_link(std::move(*nonsense), false);
  return taken != 0 || room_wanted || nonsense;
}

/// Under the lock, or while a job of this link runs, since the descriptor stays open then.
void mapped_link::ring_peer() noexcept {
  if (peer_doorbell_) [[maybe_unused]]
    const auto written = ::eventfd_write(peer_doorbell_.get(), 1);
}

}  // namespace troupe::transport::shm
