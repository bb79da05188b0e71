#include "troupe/transport/shm/mapped_link.hpp"

#include <algorithm>
#include <new>
#include <string>
#include <thread>
#include <utility>

#include <sys/eventfd.h>

#include "troupe/transport/random.hpp"

namespace troupe::transport::shm {

namespace {

/// A caller that polls looks at its ring in every call. It enters the kernel (for other links,
/// timers, a dead peer) only after this many calls found nothing and this time has passed, since
/// that takes as long as fifty looks at the ring.
constexpr std::uint32_t calls_per_look = 64;
constexpr std::chrono::microseconds between_looks{20};
/// How long the end of a GPU's copy may go unnoticed if no bell rings.
constexpr std::chrono::milliseconds between_guards{200};

/// Leaves the core to its other hardware thread for a moment: the polling thread must not slow down
/// the thread that it waits for.
inline void relax() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

mapped_link::mapped_link(backend_kind kind, const backend_context& context,
                         std::shared_ptr<shm_listener> listener, const link_options& options,
                         std::shared_ptr<link_sink> sink)
    : kind_{kind},
      options_{options},
      self_{context.options.self},
      our_uid_{context.identity.uid},
      regions_{context.regions},
      engine_{context.progress.next()},
      listener_{std::move(listener)},
      sink_{std::move(sink)},
      probe_value_{random_id()},
      ledger_{options.max_batches} {
  random_bytes(secret_);
}

std::string mapped_link::peer_name() const {
  return "the " + std::string{to_string(kind_)} + " peer";
}

// -- regions

void mapped_link::region_removed(region_id region) {
  const std::lock_guard lock{mutex_};
  auto gone = shared_regions_.extract(region);
  if (!gone || state_ != link_phase::up) return;
  gone_regions_.insert(std::move(gone));
  tell_gone_regions();
}

result<void> mapped_link::share(const message& what, std::span<const int> fds) {
  // Some kernels queue only ten messages in a socket, and an engine may grant fifty new regions at
  // once. The peer reads as soon as it wakes up.
  constexpr int most_tries = 20;
  auto sent = send_message(socket_.get(), what, fds);
  for (int i = 0; i < most_tries && !sent && sent.error().code == errc::overloaded; ++i) {
    std::this_thread::sleep_for(std::chrono::microseconds{250});
    sent = send_message(socket_.get(), what, fds);
  }
  return sent;
}

result<void> mapped_link::on_closed(region_id region) {
  return fail(errc::unauthorized, peer_name() + " has closed region " +
                                      std::to_string(region.value) +
                                      ", which it did not have open");
}

/// Does not fail without memory: what cannot be sent now is sent at the next round of the link.
void mapped_link::tell_gone_regions() noexcept {
  try {
    send_gone_regions();
  } catch (const std::bad_alloc&) {
    attention_.store(true, std::memory_order_release);
  }
}

void mapped_link::send_gone_regions() {
  while (!gone_regions_.empty()) {
    const region_gone_message said{gone_regions_.begin()->value};
    if (!send_message(socket_.get(), said)) {
      if (!gone_timer_set_) {
        engine_.call_at(std::chrono::steady_clock::now() + std::chrono::milliseconds{20},
                        shared_from_this(), gone_timer);
        gone_timer_set_ = true;
      }
      return;
    }
    gone_regions_.erase(gone_regions_.begin());
  }
}

// -- fences

std::vector<transfer_id> mapped_link::users_of(region_id region) const {
  std::set<transfer_id> users;
  const std::lock_guard lock{mutex_};
  if (slots_) slots_->add_users_of(region, users);
  add_users_of(region, users);
  for (const auto& job : active_) {
    const auto uses = [region](const piece& one) { return one.local == region; };
    if (std::ranges::any_of(job->work.pieces, uses)) users.insert(job->work.transfer);
  }
  return {users.begin(), users.end()};
}

fence_state mapped_link::fence(transfer_id transfer) {
  bool quiescent = true;
  {
    const std::lock_guard lock{mutex_};
    ledger_.fence(transfer);
    if (slots_) {
      slots_->sweep();
      quiescent = slots_->revoke(transfer);
    }
    revoke(transfer);
    quiescent = !touches(transfer) && quiescent;
    quiescent = cancel_jobs({errc::aborted, "the transfer was fenced here"}, transfer) && quiescent;
    if (!quiescent) {
      pending_fences_.insert(transfer);
      attention_.store(true, std::memory_order_release);
    }
  }
  sink_.deliver();
  return quiescent ? fence_state::quiescent : fence_state::pending;
}

/// Under the lock: frees the slots that the peer has left and answers the fences that have
/// completed.
void mapped_link::collect_quiescent() {
  if (slots_) slots_->sweep();
  std::erase_if(pending_fences_, [&](transfer_id transfer) {
    const bool copying = std::ranges::any_of(
        active_, [&](const auto& job) { return job->running && job->work.transfer == transfer; });
    if (copying || (slots_ && slots_->draining(transfer)) || touches(transfer)) return false;
    sink_.put(quiescent_event{transfer});
    return true;
  });
}

// -- progress

bool mapped_link::poll() {
  if (on_poll({})) return true;
  if (up_.load(std::memory_order_acquire)) {
    relax();
    // No read-modify-write: it does no harm if two concurrent callers lose a count.
    const auto calls = idle_polls_.load(std::memory_order_relaxed) + 1;
    idle_polls_.store(calls, std::memory_order_relaxed);
    if (calls % calls_per_look != 0) return false;
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    if (now.count() < next_round_ns_.load(std::memory_order_relaxed)) return false;
    next_round_ns_.store((now + between_looks).count(), std::memory_order_relaxed);
  }
  {
    const std::lock_guard lock{mutex_};
    if (state_ == link_phase::closed) return false;
  }
  return engine_.poll_once();
}

bool mapped_link::on_poll(steady_time /*now*/) {
  bool worked = false;
  if (up_.load(std::memory_order_acquire)) worked = drain_frames();
  if (in_work_.load(std::memory_order_acquire) != 0) worked = advance() || worked;
  if (attention_.load(std::memory_order_acquire)) worked = attend() || worked;
  return worked;
}

/// Handles rare events. Returns whether it made progress.
bool mapped_link::attend() {
  std::optional<ending> end;
  bool worked = false;
  // Two threads may poll at once, but only one at a time may populate page tables.
  const bool alone = !preparing_.exchange(true, std::memory_order_acquire);
  const bool more_pages = alone && prepare_memory();
  if (alone) preparing_.store(false, std::memory_order_release);
  {
    const std::lock_guard lock{mutex_};
    attention_.store(false, std::memory_order_relaxed);
    const auto fences = pending_fences_.size();
    const auto frames = waiting_frames_.size();
    collect_quiescent();
    if (state_ == link_phase::up) {
      flush_frames();
      if (!gone_timer_set_) tell_gone_regions();
      if (ending_ && !reading_.exchange(true, std::memory_order_acquire)) {
        if (!consumer_->ready()) end = ending_;
        reading_.store(false, std::memory_order_release);
      }
    }
    worked =
        more_pages || end || fences != pending_fences_.size() || frames != waiting_frames_.size();
    if (!pending_fences_.empty() || !waiting_frames_.empty() || memory_to_prepare() ||
        (state_ == link_phase::up && (ending_ || (!gone_regions_.empty() && !gone_timer_set_)))) {
      attention_.store(true, std::memory_order_relaxed);
    }
  }
  sink_.deliver();
  if (end) break_link(std::move(end->why), end->peer_is_dead);
  return worked;
}

bool mapped_link::before_sleep() {
  if (!up_.load(std::memory_order_acquire)) return true;
  if (in_work_.load(std::memory_order_acquire) != 0 && !may_sleep_in_work()) return false;
  if (reading_.exchange(true, std::memory_order_acquire)) return false;
  bool may_sleep = consumer_->prepare_sleep();
  reading_.store(false, std::memory_order_release);
  if (may_sleep && attention_.load(std::memory_order_acquire)) {
    const std::lock_guard lock{mutex_};
    // The peer's doorbell wakes us for pending fences and frames without room, and a timer for
    // deregistered regions. Nothing wakes us for these two.
    may_sleep = !ending_ && !memory_to_prepare();
  }
  return may_sleep && !heard_something();
}

void mapped_link::watch_over() {
  if (watched_.exchange(true, std::memory_order_acq_rel)) return;
  engine_.call_at(std::chrono::steady_clock::now() + between_guards, shared_from_this(),
                  leaf_timer);
}

void mapped_link::after_sleep() {
  if (!up_.load(std::memory_order_acquire)) return;
  incoming_->ring.words.consumer_sleeps.store(0, std::memory_order_relaxed);
}

bool mapped_link::on_ready(std::uint64_t key, std::uint32_t /*events*/) {
  const auto self = shared_from_this();
  switch (static_cast<watch_key>(key)) {
    case socket_key:
      drain_control(1);  // the watch is level-triggered, so other links have their turn first
      return true;
    case doorbell_key: {
      std::uint64_t count = 0;
      {
        const std::lock_guard lock{mutex_};
        if (our_doorbell_) [[maybe_unused]]
          const auto got = ::eventfd_read(our_doorbell_.get(), &count);
      }
      on_doorbell();
      on_poll({});
      retire_when_quiescent();
      return true;
    }
    case death_key: {
      const std::lock_guard lock{mutex_};
      if (death_watch_) engine_.unwatch(*std::exchange(death_watch_, std::nullopt));
    }
      end_after_frames({errc::peer_lost, "the peer's process has ended"}, true);
      return true;
  }
  return false;
}

void mapped_link::on_timer(std::uint64_t key, steady_time /*now*/) {
  const auto self = shared_from_this();
  switch (static_cast<timer_key>(key)) {
    case deadline_timer: {
      {
        const std::lock_guard lock{mutex_};
        deadline_.reset();
        if (state_ != link_phase::connecting) return;
      }
      break_link(
          {errc::peer_unreachable, peer_name() + " did not complete the handshake within " +
                                       std::to_string(options_.connect_timeout.count()) + " ms"},
          false);
      return;
    }
    case dial_timer: dial(); return;
    case leaf_timer: on_leaf_timer(); return;
    case gone_timer: {
      const std::lock_guard lock{mutex_};
      gone_timer_set_ = false;
      if (state_ == link_phase::up) tell_gone_regions();
      return;
    }
    case retire_timer: {
      const std::lock_guard lock{mutex_};
      retire_timer_set_ = false;
    }
      attend();
      retire_when_quiescent();
      return;
  }
}

// -- ending

/// Under the lock: ends the batches of one transfer, or all. Running batches end when their thread
/// returns. Returns whether there was none of these.
bool mapped_link::cancel_jobs(const troupe::error& why, std::optional<transfer_id> transfer) {
  bool ended = true;
  std::vector<std::shared_ptr<mapped_job>> stopped;
  for (const auto& job : active_) {
    if (transfer && job->work.transfer != *transfer) continue;
    job->cancelled.store(true, std::memory_order_release);
    if (!job->running) stopped.push_back(job);
    ended = ended && !job->running;
  }
  for (const auto& job : stopped) {
    job->failure = why;
    finish(job);
  }
  return ended;
}

/// Under the lock, in the state `broken` or `closed`: takes back all grants, drops the frames that
/// wait, and ends every batch.
void mapped_link::end_everything(const troupe::error& why) {
  up_.store(false, std::memory_order_release);
  if (slots_) slots_->revoke_all();
  revoke_all();
  waiting_frames_.clear();
  waiting_bytes_ = 0;
  cancel_jobs(why);
}

void mapped_link::break_link(troupe::error why, bool peer_is_dead) {
  const auto self = shared_from_this();
  {
    const std::lock_guard lock{mutex_};
    if (peer_is_dead && slots_) slots_->peer_is_dead();
    if (state_ != link_phase::broken && state_ != link_phase::closed) {
      if (!peer_is_dead) say_bye();
      state_ = link_phase::broken;
      why_broken_ = why;
      end_everything(why);
      broken_event_due_ = running_ != 0;
      if (!broken_event_due_) sink_.put(broken_event{std::move(why)});
    }
    collect_quiescent();
  }
  sink_.deliver();
  retire_when_quiescent();
}

/// Under the lock: makes the peer break the link as well, also while it is still connecting. If its
/// queue is full, it sees the socket close instead.
void mapped_link::say_bye() {
  const int to = socket_ ? socket_.get() : parked_ ? parked_->socket.get() : -1;
  if (to >= 0) static_cast<void>(send_message(to, bye_message{}));
}

void mapped_link::end_after_frames(troupe::error why, bool peer_is_dead) {
  {
    const std::lock_guard lock{mutex_};
    if (state_ == link_phase::up) {
      if (!ending_) {
        ending_ = ending{why, peer_is_dead};
      } else {
        ending_->peer_is_dead = ending_->peer_is_dead || peer_is_dead;
      }
      attention_.store(true, std::memory_order_release);
    }
  }
  on_poll({});
  {
    const std::lock_guard lock{mutex_};
    if (state_ == link_phase::up) return;
  }
  break_link(std::move(why), peer_is_dead);
}

void mapped_link::close() {
  const auto self = shared_from_this();
  sink_.mute_broken();
  {
    const std::lock_guard lock{mutex_};
    if (state_ == link_phase::closed) return;
    if (state_ != link_phase::broken) say_bye();
    state_ = link_phase::closed;
    broken_event_due_ = false;
    end_everything({errc::aborted, "the link was closed"});
    collect_quiescent();
  }
  sink_.deliver();
  retire_when_quiescent();
}

/// Unregisters from the engine and closes every descriptor once a broken or closed link is
/// quiescent on both sides.
void mapped_link::retire_when_quiescent() {
  {
    const std::lock_guard control_lock{control_mutex_};
    const std::lock_guard lock{mutex_};
    if (retired_ || (state_ != link_phase::broken && state_ != link_phase::closed)) return;
    // After it has retired, no round runs any more: answer a fence that came during the last copy
    // now.
    collect_quiescent();
    let_go();
  }
  sink_.deliver();
}

/// Under both locks.
void mapped_link::let_go() {
  if (running_ != 0 || (slots_ && slots_->any_draining()) || touches_any()) {
    if (!std::exchange(retire_timer_set_, true)) {
      engine_.call_at(std::chrono::steady_clock::now() + std::chrono::milliseconds{20},
                      shared_from_this(), retire_timer);
    }
    return;
  }
  retired_ = true;
  listener_->forget(secret_);
  for (auto* watch : {&socket_watch_, &doorbell_watch_, &death_watch_}) {
    if (*watch) engine_.unwatch(**watch);
    watch->reset();
  }
  if (deadline_) engine_.cancel(*std::exchange(deadline_, std::nullopt));
  if (std::exchange(polled_, false)) engine_.remove_poller(this);
  parked_.reset();
  socket_.reset();
  our_doorbell_.reset();
  peer_doorbell_.reset();
  peer_process_ = {};
  forget_peer_memory();
}

link_stats mapped_link::stats() const {
  const std::lock_guard lock{mutex_};
  auto now = ledger_.stats();
  now.lanes = 1;
  if (outgoing_ != nullptr) {
    const auto& ours = outgoing_->counters;
    const auto& theirs = incoming_->counters;
    now.bytes_out = ours.bytes_written.load(std::memory_order_relaxed) +
                    theirs.bytes_read.load(std::memory_order_relaxed);
    now.bytes_in = ours.bytes_read.load(std::memory_order_relaxed) +
                   theirs.bytes_written.load(std::memory_order_relaxed);
    now.refused = theirs.refused.load(std::memory_order_relaxed);
  }
  return now;
}

}  // namespace troupe::transport::shm
