#include "troupe/actors/event_queue.hpp"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <string>
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

/// Whether it is the one outcome of its operation.
bool is_outcome(const event& e) {
  return !std::holds_alternative<event_allocated>(e.what) &&
         !std::holds_alternative<event_layers>(e.what) &&
         !std::holds_alternative<event_unpinned>(e.what);
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
  if (fd_ >= 0) ::close(fd_);
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
    const auto id = e.what.operation;
    const bool last = e.last;
    events_.push_back(std::move(e));
    const auto found = claims_.find(id);
    const bool is_claimed = found != claims_.end();
    if (!is_claimed) count_.fetch_add(1, std::memory_order_acq_rel);
    if (events_.size() >= merge_at_) merge_layers_locked();
    if (is_claimed) {
      if (last) found->second->end_locked();
      return;
    }
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
  count_.store(count_visible_locked(), std::memory_order_release);
}

bool event_queue::is_claimed_locked(operation_id operation) const {
  return !claims_.empty() && claims_.contains(operation);
}

std::size_t event_queue::count_visible_locked() const {
  if (claims_.empty()) return events_.size();
  return static_cast<std::size_t>(std::ranges::count_if(
      events_, [this](const auto& waiting) { return !claims_.contains(waiting.what.operation); }));
}

bool event_queue::recount_locked() {
  const auto count = count_visible_locked();
  count_.store(count, std::memory_order_release);
  if (count > 0) {
    signal_locked();
  } else {
    drain_locked();
  }
  return count > 0 && waiting_ > 0;
}

void event_queue::signal_locked() {
  if (std::exchange(signalled_, true)) return;
  const std::uint64_t one = 1;
  // Only a full counter can refuse, and then the descriptor is readable as it should be.
  [[maybe_unused]] const auto written = write(fd_, &one, sizeof one);
}

void event_queue::drain_locked() {
  if (!std::exchange(signalled_, false)) return;
  std::uint64_t drained = 0;
  [[maybe_unused]] const auto got = read(fd_, &drained, sizeof drained);
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
    if (queue_.empty()) return;
    queue_.signal_locked();
    wake = queue_.waiting_ > 0;
  }
  if (wake) queue_.available_.notify_all();
}

void event_queue::note_taken_locked(const waiting_event& taken, std::vector<operation_id>& ended) {
  const auto id = taken.what.operation;
  if (taken.last) {
    ended.push_back(id);
    outcome_taken_.erase(id);
  } else if (is_outcome(taken.what)) {
    outcome_taken_.insert(id);
  }
}

std::vector<event> event_queue::take_locked(std::size_t max) {
  const auto count = std::min(max, size());
  std::vector<event> taken;
  taken.reserve(count);
  std::vector<operation_id> ended;
  std::vector<waiting_event> claimed;
  while (taken.size() < count) {
    auto& next = events_.front();
    if (is_claimed_locked(next.what.operation)) {
      claimed.push_back(std::move(next));
    } else {
      note_taken_locked(next, ended);
      taken.push_back(std::move(next.what));
    }
    events_.pop_front();
  }
  events_.insert(events_.begin(), std::move_iterator{claimed.begin()},
                 std::move_iterator{claimed.end()});
  if (!ended.empty()) operations_.last_event_taken(ended);
  count_.fetch_sub(count, std::memory_order_acq_rel);
  if (empty()) drain_locked();
  return taken;
}

std::vector<event> event_queue::take(std::size_t max) {
  const std::lock_guard lock{mutex_};
  return take_locked(max);
}

std::vector<event> event_queue::wait(std::chrono::milliseconds timeout, std::size_t max) {
  std::unique_lock lock{mutex_};
  ++waiting_;
  available_.wait_for(lock, timeout, [this] { return !empty(); });
  --waiting_;
  return take_locked(max);
}

// -- waiting for one operation

result<std::unique_ptr<event_queue::claim>> event_queue::claim_events(operation_id operation) {
  auto made = std::make_unique<claim>(*this, operation);
  const std::lock_guard lock{mutex_};
  const auto name = "operation " + std::to_string(operation.value);
  if (!operations_.is_open(operation) || outcome_taken_.contains(operation)) {
    return fail(errc::not_found, name + " is not known, or its outcome was taken already");
  }
  if (!claims_.try_emplace(operation, made.get()).second) {
    return fail(errc::already_exists, "another thread waits for " + name);
  }
  if (has_last_locked(operation) || closed_) made->over_.store(true, std::memory_order_release);
  (void)recount_locked();
  return made;
}

bool event_queue::has_last_locked(operation_id operation) const {
  return std::ranges::any_of(events_, [&](const waiting_event& waiting) {
    return waiting.last && waiting.what.operation == operation;
  });
}

void event_queue::close(troupe::error why) {
  const std::lock_guard lock{mutex_};
  if (!closed_) closed_ = std::move(why);
  for (const auto& [operation, waiting] : claims_) waiting->end_locked();
}

std::vector<event> event_queue::take_all_locked(operation_id operation) {
  std::vector<event> taken;
  std::vector<operation_id> ended;
  std::deque<waiting_event> others;
  for (auto& waiting : events_) {
    if (waiting.what.operation != operation) {
      others.push_back(std::move(waiting));
      continue;
    }
    note_taken_locked(waiting, ended);
    taken.push_back(std::move(waiting.what));
  }
  events_ = std::move(others);
  if (!ended.empty()) operations_.last_event_taken(ended);
  return taken;
}

void event_queue::end_claim(claim& of) {
  bool wake = false;
  {
    const std::lock_guard lock{mutex_};
    const auto found = claims_.find(of.operation_);
    if (found == claims_.end() || found->second != &of) return;  // it was refused
    claims_.erase(found);
    wake = recount_locked();
  }
  if (wake) available_.notify_all();
}

event_queue::claim::claim(event_queue& queue, operation_id operation)
    : queue_{queue}, operation_{operation}, fd_{eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)} {}

event_queue::claim::~claim() {
  queue_.end_claim(*this);
  if (fd_ >= 0) ::close(fd_);
}

void event_queue::claim::end_locked() {
  over_.store(true, std::memory_order_release);
  if (thread_ == std::this_thread::get_id()) return;
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = write(fd_, &one, sizeof one);
  ended_.notify_one();
}

void event_queue::claim::wait_until(std::chrono::steady_clock::time_point until) {
  std::unique_lock lock{queue_.mutex_};
  ended_.wait_until(lock, until, [this] { return is_over(); });
}

std::optional<result<std::vector<event>>> event_queue::claim::take() {
  const std::lock_guard lock{queue_.mutex_};
  if (queue_.has_last_locked(operation_)) return queue_.take_all_locked(operation_);
  if (queue_.closed_) return fail(*queue_.closed_);
  return std::nullopt;
}

}  // namespace troupe::actors
