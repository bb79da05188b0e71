#include "troupe/actors/event_queue.hpp"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <utility>

#include <sys/eventfd.h>
#include <unistd.h>

namespace troupe::actors {

namespace {

/// Whether `next` says the same as `last` but for more tokens: then the engine need hear of it
/// once.
bool extends(const event& last, const event& next) {
  if (last.operation != next.operation) return false;
  const auto* before = std::get_if<event_layers>(&last.what);
  const auto* after = std::get_if<event_layers>(&next.what);
  return before != nullptr && after != nullptr &&
         before->slice.layer_begin == after->slice.layer_begin &&
         before->slice.layer_end == after->slice.layer_end &&
         before->slice.token_end == after->slice.token_begin;
}

}  // namespace

event_queue::event_queue() : fd_{eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)} {}

event_queue::~event_queue() {
  if (fd_ >= 0) close(fd_);
}

void event_queue::push(event e) {
  bool wake = false;
  {
    const std::lock_guard lock{mutex_};
    if (!events_.empty() && extends(events_.back(), e)) {
      std::get<event_layers>(events_.back().what).slice.token_end =
          std::get<event_layers>(e.what).slice.token_end;
      return;
    }
    events_.push_back(std::move(e));
    count_.store(events_.size(), std::memory_order_release);
    if (consumer_ == std::this_thread::get_id()) return;
    signal_locked();
    wake = waiting_ > 0;
  }
  if (wake) available_.notify_one();
}

void event_queue::signal_locked() {
  if (std::exchange(signalled_, true)) return;
  const std::uint64_t one = 1;
  // Only a full counter can refuse, and then the descriptor is readable as it should be.
  [[maybe_unused]] const auto written = write(fd_, &one, sizeof one);
}

event_queue::consumer::consumer(event_queue& queue) : queue_{queue} {
  const std::lock_guard lock{queue_.mutex_};
  queue_.consumer_ = std::this_thread::get_id();
}

event_queue::consumer::~consumer() {
  bool wake = false;
  {
    const std::lock_guard lock{queue_.mutex_};
    if (queue_.consumer_ == std::this_thread::get_id()) queue_.consumer_.reset();
    if (queue_.events_.empty()) return;
    queue_.signal_locked();
    wake = queue_.waiting_ > 0;
  }
  if (wake) queue_.available_.notify_all();
}

std::vector<event> event_queue::take_locked(std::size_t max) {
  const auto count = static_cast<std::ptrdiff_t>(std::min(max, events_.size()));
  std::vector<event> taken{std::make_move_iterator(events_.begin()),
                           std::make_move_iterator(events_.begin() + count)};
  events_.erase(events_.begin(), events_.begin() + count);
  count_.store(events_.size(), std::memory_order_release);
  if (events_.empty() && signalled_) {
    signalled_ = false;
    std::uint64_t drained = 0;
    [[maybe_unused]] const auto got = read(fd_, &drained, sizeof drained);
  }
  return taken;
}

std::vector<event> event_queue::take(std::size_t max) {
  const std::lock_guard lock{mutex_};
  return take_locked(max);
}

std::vector<event> event_queue::wait(std::chrono::milliseconds timeout, std::size_t max) {
  std::unique_lock lock{mutex_};
  ++waiting_;
  available_.wait_for(lock, timeout, [this] { return !events_.empty(); });
  --waiting_;
  return take_locked(max);
}

}  // namespace troupe::actors
