#include "troupe/actors/event_queue.hpp"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <unordered_map>
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

/// What is merged in one go is worth it from here on: an engine that takes its events has fewer.
constexpr std::size_t least_merged = 1024;

/// The layer events of one operation, layer by layer.
class layer_progress {
 public:
  void add(const cache_slice& slice) {
    if (tokens_.size() < slice.layer_end) tokens_.resize(slice.layer_end);
    for (auto layer = slice.layer_begin; layer < slice.layer_end; ++layer) {
      auto& [begin, end] = tokens_[layer];
      // A layer's events follow each other without a gap.
      if (begin == end) begin = slice.token_begin;
      end = std::max(end, slice.token_end);
    }
  }
  /// As few slices as say the same.
  [[nodiscard]] std::vector<cache_slice> slices() const {
    std::vector<cache_slice> all;
    const auto layers = static_cast<std::uint32_t>(tokens_.size());
    for (std::uint32_t layer = 0; layer < layers;) {
      auto end = layer + 1;
      while (end < layers && tokens_[end] == tokens_[layer]) ++end;
      const auto [first, last] = tokens_[layer];
      if (first != last) all.push_back({layer, end, first, last});
      layer = end;
    }
    return all;
  }

 private:
  std::vector<std::pair<std::uint32_t, std::uint32_t>> tokens_;  ///< [begin, end) per layer
};

}  // namespace

event_queue::event_queue(operation_table& operations)
    : operations_{operations},
      merge_at_{least_merged},
      fd_{eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)} {}

event_queue::~event_queue() {
  if (fd_ >= 0) close(fd_);
}

void event_queue::push(event e) {
  append({std::move(e), false});
}

void event_queue::push_last(event e) {
  append({std::move(e), true});
}

void event_queue::append(waiting_event e) {
  bool wake = false;
  {
    const std::lock_guard lock{mutex_};
    if (!events_.empty() && extends(events_.back().what, e.what)) {
      std::get<event_layers>(events_.back().what.what).slice.token_end =
          std::get<event_layers>(e.what.what).slice.token_end;
      return;
    }
    events_.push_back(std::move(e));
    if (events_.size() >= merge_at_) merge_layers_locked();
    count_.store(events_.size(), std::memory_order_release);
    if (consumer_ == std::this_thread::get_id()) return;
    signal_locked();
    wake = waiting_ > 0;
  }
  if (wake) available_.notify_one();
}

/// All layer events of an operation move to where its first one waits. Costs each event a constant
/// share, since it is done again only once twice as many wait.
void event_queue::merge_layers_locked() {
  std::unordered_map<operation_id, layer_progress> progress;
  for (const auto& [e, last] : events_) {
    if (const auto* layers = std::get_if<event_layers>(&e.what)) {
      progress[e.operation].add(layers->slice);
    }
  }
  std::deque<waiting_event> merged;
  for (auto& waiting : events_) {
    const auto id = waiting.what.operation;
    if (!std::holds_alternative<event_layers>(waiting.what.what)) {
      merged.push_back(std::move(waiting));
    } else if (const auto of = progress.find(id); of != progress.end()) {
      for (const auto& slice : of->second.slices()) {
        merged.push_back({{id, event_layers{slice}}, false});
      }
      progress.erase(of);
    }
  }
  events_ = std::move(merged);
  merge_at_ = std::max(least_merged, 2 * events_.size());
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
  std::vector<event> taken;
  taken.reserve(static_cast<std::size_t>(count));
  std::size_t ended = 0;
  std::for_each_n(events_.begin(), count, [&](waiting_event& waiting) {
    taken.push_back(std::move(waiting.what));
    ended += waiting.last ? 1 : 0;
  });
  events_.erase(events_.begin(), events_.begin() + count);
  if (ended != 0) operations_.last_event_taken(ended);
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
