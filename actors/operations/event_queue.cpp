#include "troupe/actors/operations/event_queue.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <new>
#include <string>
#include <system_error>
#include <utility>

#include <sys/eventfd.h>
#include <unistd.h>

#include "troupe/kvcache/or_error.hpp"
#include "troupe/kvcache/or_undo.hpp"

namespace troupe::actors {

namespace {

/// Whether it is the one outcome of its operation.
bool is_outcome(const event& e) {
  return std::holds_alternative<event_done>(e.what) ||
         std::holds_alternative<event_failed>(e.what) ||
         std::holds_alternative<event_value>(e.what) ||
         std::holds_alternative<event_info>(e.what) || std::holds_alternative<event_placed>(e.what);
}

}  // namespace

event_queue::event_queue(operation_table& operations)
    : operations_{operations}, fd_{eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)} {
  if (fd_ < 0) {
    throw std::system_error{errno, std::generic_category(),
                            "no descriptor for the events of the engine"};
  }
}

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
    if (const auto found = claims_.find(e.what.operation); found != claims_.end()) {
      auto& of = *found->second;
      const bool last = e.last;
      of.events_.push(std::move(e));
      if (last) of.end_locked();
      return;
    }
    if (!events_.push(std::move(e))) return;
    wake = show_locked();
  }
  if (wake) available_.notify_one();
}

bool event_queue::conclude(event outcome, bool last) {
  bool wake = false;
  {
    const std::lock_guard lock{mutex_};
    if (!conclude_locked(std::move(outcome), last)) return false;
    wake = show_locked();
  }
  if (wake) available_.notify_one();
  return true;
}

bool event_queue::conclude_locked(event outcome, bool last) {
  const auto id = outcome.operation;
  const auto* failed = std::get_if<event_failed>(&outcome.what);
  const auto failure = failed != nullptr ? std::optional{failed->why} : std::nullopt;
  const auto found = claims_.find(id);
  auto& line = found == claims_.end() ? events_ : found->second->events_;
  line.push({std::move(outcome), last});
  bool ends = false;
  or_undo([&] { ends = operations_.end(id, failure); }, [&] { line.drop_newest(id); });
  if (!ends) {
    line.drop_newest(id);
    return false;
  }
  if (last && found != claims_.end()) found->second->end_locked();
  return true;
}

void event_queue::pay_outcomes_locked() {
  if (!owes_outcomes_) return;
  for (const auto id : operations_.live()) {
    (void)conclude_locked({id, event_failed{closed_->failure}}, true);
  }
  owes_outcomes_ = false;
  (void)show_locked();  // nobody waits in a closed queue
}

bool event_queue::show_locked() {
  publish_count_locked();
  if (empty()) {
    drain_locked();
    return false;
  }
  if (consumer_ == std::this_thread::get_id()) return false;
  signal_locked();
  return waiting_ > 0;
}

void event_queue::publish_count_locked() {
  count_.store(events_.size() + (members_ ? members_->size() : 0) + (owes_outcomes_ ? 1U : 0U),
               std::memory_order_release);
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

void event_queue::take_locked(waiting_events& from, std::size_t count, std::vector<event>& into) {
  std::vector<operation_id> ended, outcomes;
  ended.reserve(count);
  outcomes.reserve(count);
  or_undo(
      [&] {
        from.look_at(count, [&](const waiting_event& next) {
          const auto id = next.what.operation;
          if (next.last) {
            ended.push_back(id);
          } else if (is_outcome(next.what)) {
            outcome_taken_.insert(id);
            outcomes.push_back(id);
          }
        });
      },
      [&] {
        for (const auto id : outcomes) outcome_taken_.erase(id);
      });
  // Nothing is allocated from here on.
  for (std::size_t i = 0; i < count; ++i) into.push_back(std::move(from.pop().what));
  for (const auto id : ended) outcome_taken_.erase(id);
  if (!ended.empty()) operations_.last_event_taken(ended);
}

std::vector<event> event_queue::take_unclaimed_locked(std::size_t max) {
  pay_outcomes_locked();
  const auto of_members = members_ ? std::min(max, members_->size()) : 0;
  const auto of_operations = std::min(max - of_members, events_.size());
  std::vector<event> taken;
  taken.reserve(of_members + of_operations);
  try {
    while (taken.size() < of_members) taken.push_back({operation_id{}, members_->pop()});
    take_locked(events_, of_operations, taken);
  } catch (const std::bad_alloc&) {
    if (taken.empty()) throw;
    // Members that were told must not be lost; the rest waits for the next call.
  }
  publish_count_locked();
  if (empty()) drain_locked();
  return taken;
}

std::vector<event> event_queue::take(std::size_t max) {
  const std::lock_guard lock{mutex_};
  return take_unclaimed_locked(max);
}

std::vector<event> event_queue::wait(std::chrono::milliseconds timeout, std::size_t max) {
  std::unique_lock lock{mutex_};
  ++waiting_;
  available_.wait_for(lock, timeout, [this] { return !empty() || closed_.has_value(); });
  --waiting_;
  return take_unclaimed_locked(max);
}

// -- members

void event_queue::watch_members(std::string self) {
  const std::lock_guard lock{mutex_};
  members_.emplace(std::move(self));
}

void event_queue::see(const membership& list) {
  bool wake = false;
  {
    const std::lock_guard lock{mutex_};
    if (!members_) return;
    members_->see(list);
    wake = show_locked();
  }
  if (wake) available_.notify_all();
}

void event_queue::end_watch() {
  const std::lock_guard lock{mutex_};
  members_.reset();
  (void)show_locked();
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
  made->events_ = events_.extract(operation);
  if (made->has_last() || closed_) made->over_.store(true, std::memory_order_release);
  publish_count_locked();
  if (empty()) drain_locked();
  return made;
}

void event_queue::close(troupe::error failure, troupe::error unending) noexcept {
  operations_.close();
  {
    const std::lock_guard lock{mutex_};
    if (!closed_) closed_ = {std::move(failure), std::move(unending)};
    owes_outcomes_ = true;
    (void)or_error("", [this] { pay_outcomes_locked(); });
    for (const auto& [operation, waiting] : claims_) waiting->end_locked();
    (void)show_locked();
  }
  available_.notify_all();
}

void event_queue::end_claim(claim& of) {
  bool wake = false;
  {
    const std::lock_guard lock{mutex_};
    const auto found = claims_.find(of.operation_);
    if (found == claims_.end() || found->second != &of) return;  // it was refused
    claims_.erase(found);
    if (of.events_.empty()) return;
    events_.put_first(std::move(of.events_));
    publish_count_locked();
    signal_locked();
    wake = waiting_ > 0;
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
  queue_.pay_outcomes_locked();
  if (has_last()) {
    std::vector<event> taken;
    taken.reserve(events_.size());
    queue_.take_locked(events_, events_.size(), taken);
    return taken;
  }
  if (queue_.closed_) return fail(queue_.closed_->unending);
  return std::nullopt;
}

}  // namespace troupe::actors
