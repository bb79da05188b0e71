#include "troupe/transport/progress_engine.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <string>
#include <utility>

#include <poll.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "troupe/kvcache/or_error.hpp"
#include "troupe/transport/os_error.hpp"

namespace troupe::transport {

namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr std::uint64_t wake_id = 0;    // watches count from 1
constexpr milliseconds caller_hold{1};  // how long after a caller's poll the thread stands aside
constexpr std::uint32_t rounds_per_events = 8;  // polling rounds between two looks at epoll
/// How long after a driver has left the thread takes over. Longer than the pause between two waits
/// of an engine that does little else, so that such an engine never pays for waking the thread:
/// sending the interrupt that wakes another core costs some 40 us on a virtual machine.
constexpr std::chrono::microseconds handover_delay{100};
/// How long before its expiry a driver stops the handover timer, which would wake the thread for
/// nothing.
constexpr std::chrono::microseconds handover_margin{25};
/// Idle rounds between two offers of the core to other threads.
constexpr std::uint32_t rounds_per_yield = 4;
/// If a yield took longer than this, another thread took the core.
constexpr std::chrono::microseconds short_yield{3};

std::int64_t nanoseconds(steady_time t) {
  return t.time_since_epoch().count();
}

/// Makes an eventfd readable. Fails only if its counter is full, and then it is readable already.
void signal(int fd) {
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(fd, &one, sizeof one);
}

void drain(int fd) {
  std::uint64_t count = 0;
  [[maybe_unused]] const auto got = ::read(fd, &count, sizeof count);
}

/// Arms a timerfd; 0: disarms it.
void set_timer(int fd, std::chrono::nanoseconds after) {
  itimerspec when{};
  when.it_value.tv_nsec = after.count();
  ::timerfd_settime(fd, 0, &when, nullptr);
}

/// Makes a call at the end of the scope.
template <class Call>
class at_end {
 public:
  explicit at_end(Call call) : call_{std::move(call)} {}
  ~at_end() { call_(); }
  at_end(const at_end&) = delete;
  at_end& operator=(const at_end&) = delete;

 private:
  Call call_;
};

/// Yields the core between idle rounds: the scheduler may have put the peer on this very core, and
/// then nothing can arrive before we let go of it. If the last offer was taken, the next one
/// follows the first idle round.
class core_offer {
 public:
  void idle_round() {
    if (++rounds_ < (taken_ ? 1 : rounds_per_yield)) return;
    rounds_ = 0;
    const auto before = steady_clock::now();
    std::this_thread::yield();
    taken_ = steady_clock::now() - before > short_yield;
  }

 private:
  std::uint32_t rounds_{0};
  bool taken_{false};
};

}  // namespace

result<progress_engine::descriptors> progress_engine::open_descriptors() {
  const auto refused = [](const char* call) {
    return fail(errc::pool_exhausted, std::string{"progress engine: "} + call + ": " +
                                          what_errno(errno) + "; raise the limit of open files");
  };
  descriptors fds;
  fds.epoll = owned_fd{::epoll_create1(EPOLL_CLOEXEC)};
  if (!fds.epoll) return refused("epoll_create1");
  fds.wake = owned_fd{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  if (!fds.wake) return refused("eventfd");
  fds.kick = owned_fd{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  if (!fds.kick) return refused("eventfd");
  fds.handover = owned_fd{::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK)};
  if (!fds.handover) return refused("timerfd_create");
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = wake_id;
  if (::epoll_ctl(fds.epoll.get(), EPOLL_CTL_ADD, fds.wake.get(), &event) != 0) {
    return refused("epoll_ctl");
  }
  return fds;
}

result<std::unique_ptr<progress_engine>> progress_engine::create(settings with) {
  auto fds = open_descriptors();
  if (!fds) return fail(std::move(fds).error());
  std::unique_ptr<progress_engine> made{new progress_engine(std::move(with), std::move(*fds))};
  if (made->with_.own_thread) {
    made->thread_ = std::thread{[engine = made.get()] { engine->run_thread(); }};
    // Shown by `top -H`; at most 15 characters.
    ::pthread_setname_np(made->thread_.native_handle(), "troupe-progress");
  }
  return made;
}

progress_engine::progress_engine(settings with, descriptors fds)
    : with_{std::move(with)}, fds_{std::move(fds)}, spin_{with_.spin} {}

void progress_engine::stop() {
  {
    const std::lock_guard lock{turn_mutex_};
    stopping_.store(true, std::memory_order_seq_cst);
  }
  woken_.store(false, std::memory_order_seq_cst);
  wake();
  signal(fds_.kick.get());
  if (thread_.joinable()) thread_.join();
  // A driving caller still delivers events until it leaves.
  std::unique_lock lock{turn_mutex_};
  left_.wait(lock, [this] { return !driven_.load(std::memory_order_acquire); });
}

progress_engine::~progress_engine() {
  stop();
  const std::lock_guard lock{waker_->mutex_};
  waker_->engine_ = nullptr;
}

// -- registration

result<watch_id> progress_engine::watch(int fd, std::uint32_t events, std::shared_ptr<pollable> who,
                                        std::uint64_t key) {
  const std::lock_guard lock{mutex_};
  const auto id = ++last_watch_;
  epoll_event event{};
  event.events = events;
  event.data.u64 = id;
  if (::epoll_ctl(fds_.epoll.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    return fail(errc::overloaded, "cannot watch a descriptor: epoll_ctl: " + what_errno(errno));
  }
  watches_.emplace(id, watch_entry{fd, events, std::move(who), key});
  return watch_id{id};
}

void progress_engine::rearm(watch_id id, std::uint32_t events) {
  const std::lock_guard lock{mutex_};
  const auto at = watches_.find(id.value);
  if (at == watches_.end() || at->second.events == events) return;
  at->second.events = events;
  epoll_event event{};
  event.events = events;
  event.data.u64 = id.value;
  ::epoll_ctl(fds_.epoll.get(), EPOLL_CTL_MOD, at->second.fd, &event);
}

void progress_engine::unwatch(watch_id id) {
  std::shared_ptr<pollable> released;  // may be the last owner: destroyed after the lock
  const std::lock_guard lock{mutex_};
  const auto at = watches_.find(id.value);
  if (at == watches_.end()) return;
  ::epoll_ctl(fds_.epoll.get(), EPOLL_CTL_DEL, at->second.fd, nullptr);
  released = std::move(at->second.who);
  watches_.erase(at);
}

void progress_engine::add_poller(std::shared_ptr<pollable> who) {
  {
    const std::lock_guard lock{mutex_};
    pollers_.push_back(std::move(who));
    pollers_version_.fetch_add(1, std::memory_order_release);
  }
  wake();
}

void progress_engine::remove_poller(const pollable* who) {
  std::shared_ptr<pollable> released;
  {
    const std::lock_guard lock{mutex_};
    const auto at = std::find_if(pollers_.begin(), pollers_.end(),
                                 [&](const auto& p) { return p.get() == who; });
    if (at == pollers_.end()) return;
    released = std::move(*at);
    pollers_.erase(at);
    pollers_version_.fetch_add(1, std::memory_order_release);
  }
  wake();  // so that a sleeping thread lets go of its copy
}

timer_id progress_engine::call_at(steady_time when, std::shared_ptr<pollable> who,
                                  std::uint64_t key) {
  std::uint64_t id = 0;
  bool first = false;
  {
    const std::lock_guard lock{mutex_};
    id = ++last_timer_;
    const auto at = timers_.emplace(std::pair{when, id}, timer_entry{std::move(who), key}).first;
    timer_times_.emplace(id, when);
    first = at == timers_.begin();
    if (first) next_timer_ns_.store(nanoseconds(when), std::memory_order_release);
  }
  if (first) wake();
  return timer_id{id};
}

void progress_engine::cancel(timer_id id) {
  std::shared_ptr<pollable> released;
  const std::lock_guard lock{mutex_};
  const auto at = timer_times_.find(id.value);
  if (at == timer_times_.end()) return;
  const auto timer = timers_.find({at->second, id.value});
  released = std::move(timer->second.who);
  timers_.erase(timer);
  timer_times_.erase(at);
}

void progress_engine::wake() {
  if (woken_.exchange(true, std::memory_order_seq_cst)) return;
  signal(fds_.wake.get());
}

void engine_waker::wake() noexcept {
  const std::lock_guard lock{mutex_};
  if (engine_ != nullptr) engine_->wake();
}

// -- rounds

void progress_engine::caller_polls() noexcept {
  if (!with_.own_thread) return;  // nobody to keep out of the way
  const auto now = nanoseconds(steady_clock::now());
  const auto before = caller_ns_.exchange(now, std::memory_order_acq_rel);
  if (now - before < std::chrono::nanoseconds{caller_hold}.count()) return;
  // The caller begins to poll. Wake the thread, asleep until the next event, so that it is there
  // when the caller stops and can finish what the caller left half done (an acknowledgement held
  // back for the next frame, for instance).
  signal(fds_.kick.get());
}

bool progress_engine::poll_once() {
  // Not beside a driver: it may sleep on a doorbell that this round would consume.
  if (driven_.load(std::memory_order_acquire)) return false;
  caller_polls();
  return run_round({}, turn::of_caller);
}

bool progress_engine::run_round(const sleep_plan& sleep, turn whose) {
  if (running_.exchange(true, std::memory_order_acquire)) return false;
  bool worked = false;
  {
    // Also if the round throws, since others wait for its end.
    const at_end over{[this] { running_.store(false, std::memory_order_release); }};
    // A driver that arrived meanwhile runs no round at this moment, but may have armed its
    // doorbell.
    if (whose == turn::of_caller && driven_.load(std::memory_order_acquire)) return false;
    worked = round(sleep);
  }
  if (worked && with_.after_progress) with_.after_progress();
  return worked;
}

void progress_engine::run_thread() noexcept {
  try {
    run();
  } catch (...) {
    if (with_.on_thread_lost) with_.on_thread_lost(exception_as_error("a progress thread ended"));
  }
}

// The thread. Polls while there was work within `spin`, else sleeps.
void progress_engine::run() {
  auto last_work = steady_clock::now();
  core_offer offer;
  while (!stopping_.load(std::memory_order_acquire)) {
    {
      std::unique_lock lock{turn_mutex_};
      if (driven_) {
        aside_.store(true, std::memory_order_release);
        lock.unlock();
        wait_for_handover();
        last_work = steady_clock::now();
        continue;
      }
    }
    const auto now = steady_clock::now();
    const auto caller = caller_ns_.load(std::memory_order_acquire);
    if (nanoseconds(now) - caller < std::chrono::nanoseconds{caller_hold}.count()) {
      stand_aside();
      last_work = steady_clock::now();
      continue;
    }
    const bool may_sleep = now - last_work >= spin_.time();
    if (run_round({.may_sleep = may_sleep})) {
      last_work = steady_clock::now();
    } else {
      offer.idle_round();
    }
  }
}

// While a caller polls: sleeps where no traffic wakes the thread, until the caller's last call has
// expired (`caller_hold`).
void progress_engine::stand_aside() {
  pollfd nothing{};
  nothing.fd = -1;
  ::poll(&nothing, 1, static_cast<int>(caller_hold.count()));
}

// While a caller drives: sleeps until the timer that it sets when it leaves has run out and nobody
// else drives.
void progress_engine::wait_for_handover() {
  while (!stopping_.load(std::memory_order_acquire)) {
    std::array<pollfd, 2> readable{};
    readable[0] = {fds_.handover.get(), POLLIN, 0};
    readable[1] = {fds_.kick.get(), POLLIN, 0};
    ::poll(readable.data(), readable.size(), -1);
    if (readable[0].revents != 0) drain(fds_.handover.get());
    if (readable[1].revents != 0) drain(fds_.kick.get());
    if (readable[0].revents == 0) continue;
    const std::lock_guard lock{turn_mutex_};
    if (driven_) continue;
    aside_.store(false, std::memory_order_release);
    return;
  }
}

bool progress_engine::drive(steady_time until, int wake_fd, const std::function<bool()>& done) {
  {
    const std::lock_guard lock{turn_mutex_};
    if (stopping_.load(std::memory_order_acquire)) return false;
    if (driven_.exchange(true, std::memory_order_acq_rel)) return false;
  }
  const at_end over{[this] { leave(); }};
  if (with_.own_thread && !aside_.load(std::memory_order_acquire)) signal(fds_.kick.get());
  auto last_work = steady_clock::now();
  core_offer offer;
  while (!done() && !stopping_.load(std::memory_order_acquire)) {
    const auto now = steady_clock::now();
    if (now >= until) break;
    const bool may_sleep = now - last_work >= spin_.time() &&
                           (!with_.own_thread || aside_.load(std::memory_order_acquire));
    // Stops the handover timer of the last driver before it wakes the thread for nothing. Only
    // drivers that stay long enough pay for this.
    if (handover_at_ && (may_sleep || now + handover_margin >= *handover_at_)) {
      handover_at_.reset();
      set_timer(fds_.handover.get(), {});
    }
    if (run_round({may_sleep, until, wake_fd})) {
      last_work = steady_clock::now();
    } else {
      offer.idle_round();
    }
  }
  return true;
}

void progress_engine::leave() {
  const std::lock_guard lock{turn_mutex_};
  driven_ = false;
  left_.notify_all();  // under the lock: the waiter may destroy the engine next
  handover_at_ = steady_clock::now() + handover_delay;
  set_timer(fds_.handover.get(), handover_delay);
}

bool progress_engine::round(const sleep_plan& sleep) {
  refresh_pollers();
  auto now = steady_clock::now();
  bool worked = poll_pollers(now);
  if (!worked && sleep.may_sleep) {
    if (prepare_sleep()) {
      sleep_until(sleep, now);
      worked = take_events();
      now = steady_clock::now();
    } else {
      worked = true;  // there was work, perhaps done already: run what it caused
    }
  } else if (round_pollers_.empty() || ++rounds_since_events_ >= rounds_per_events) {
    worked = take_events() || worked;
  }
  if (nanoseconds(now) >= next_timer_ns_.load(std::memory_order_acquire)) {
    worked = run_timers(now) || worked;
  }
  return worked;
}

// Clears `running_` while asleep, so that a caller can poll meanwhile.
void progress_engine::sleep_until(const sleep_plan& sleep, steady_time now) {
  const auto timeout = time_to_sleep(now, sleep.until);
  running_.store(false, std::memory_order_release);
  std::array<pollfd, 2> readable{};
  readable[0] = {fds_.epoll.get(), POLLIN, 0};
  const bool is_thread = sleep.wake_fd < 0;
  readable[1] = {is_thread ? fds_.kick.get() : sleep.wake_fd, POLLIN, 0};
  ::poll(readable.data(), readable.size(), static_cast<int>(timeout.count()));
  spin_.slept(steady_clock::now() - now);
  if (is_thread && readable[1].revents != 0) drain(fds_.kick.get());
  // If a caller took over, its `run_round` will store false: wait for that round to end first.
  while (running_.exchange(true, std::memory_order_acquire)) std::this_thread::yield();
  end_sleep();
}

bool progress_engine::take_events() {
  rounds_since_events_ = 0;
  std::array<epoll_event, 64> events{};
  const int count =
      ::epoll_wait(fds_.epoll.get(), events.data(), static_cast<int>(events.size()), 0);
  bool worked = false;
  for (int i = 0; i < count; ++i) {
    const auto id = events[static_cast<std::size_t>(i)].data.u64;
    if (id == wake_id) {
      drain_wake();
      worked = true;  // the waker wants rounds: poll for a while
      continue;
    }
    std::shared_ptr<pollable> who;
    std::uint64_t key = 0;
    {
      const std::lock_guard lock{mutex_};
      const auto at = watches_.find(id);
      if (at == watches_.end()) continue;
      who = at->second.who;
      key = at->second.key;
    }
    worked = who->on_ready(key, events[static_cast<std::size_t>(i)].events) || worked;
  }
  return worked;
}

void progress_engine::drain_wake() {
  // In this order, a wake in between writes once more. In the other order, its write could be read
  // here while `woken_` still announces it, and nobody would write again.
  drain(fds_.wake.get());
  woken_.exchange(false, std::memory_order_seq_cst);
}

bool progress_engine::run_timers(steady_time now) {
  bool worked = false;
  while (true) {
    timer_entry due;
    {
      const std::lock_guard lock{mutex_};
      const auto first = timers_.begin();
      next_timer_ns_.store(first == timers_.end() ? INT64_MAX : nanoseconds(first->first.first),
                           std::memory_order_release);
      if (first == timers_.end() || first->first.first > now) return worked;
      due = std::move(first->second);
      timer_times_.erase(first->first.second);
      timers_.erase(first);
    }
    worked = true;
    due.who->on_timer(due.key, now);
  }
}

milliseconds progress_engine::time_to_sleep(steady_time now, steady_time until) const {
  const auto next = std::min(next_timer_ns_.load(std::memory_order_acquire), nanoseconds(until));
  if (next == INT64_MAX) return milliseconds{-1};
  const auto left = next - nanoseconds(now);
  if (left <= 0) return milliseconds{0};
  return milliseconds{std::min<std::int64_t>(left / 1'000'000 + 1, 60'000)};
}

// -- pollers

void progress_engine::refresh_pollers() {
  if (round_pollers_version_ == pollers_version_.load(std::memory_order_acquire)) return;
  std::vector<std::shared_ptr<pollable>> fresh;
  {
    const std::lock_guard lock{mutex_};
    fresh = pollers_;
    round_pollers_version_ = pollers_version_.load(std::memory_order_acquire);
  }
  round_pollers_.swap(fresh);  // removed pollers are destroyed here, without the lock
}

bool progress_engine::poll_pollers(steady_time now) {
  bool worked = false;
  for (const auto& who : round_pollers_) worked = who->on_poll(now) || worked;
  return worked;
}

bool progress_engine::prepare_sleep() {
  asleep_.store(true, std::memory_order_seq_cst);
  for (std::size_t i = 0; i < round_pollers_.size(); ++i) {
    if (round_pollers_[i]->before_sleep()) continue;
    asleep_.store(false, std::memory_order_relaxed);
    for (std::size_t armed = 0; armed <= i; ++armed) round_pollers_[armed]->after_sleep();
    return false;
  }
  return true;
}

void progress_engine::end_sleep() {
  asleep_.store(false, std::memory_order_relaxed);
  for (const auto& who : round_pollers_) who->after_sleep();
}

// -- the pool

result<std::unique_ptr<progress_pool>> progress_pool::create(const progress_engine::settings& with,
                                                             std::uint32_t num_workers) {
  std::unique_ptr<progress_pool> pool{new progress_pool};
  for (std::uint32_t i = 0; i < std::max<std::uint32_t>(num_workers, 1); ++i) {
    auto engine = progress_engine::create(with);
    if (!engine) return fail(std::move(engine).error());
    pool->engines_.push_back(std::move(*engine));
  }
  return pool;
}

void progress_pool::stop() {
  for (const auto& engine : engines_) engine->stop();
}

bool progress_pool::drive(steady_time until, int wake_fd, const std::function<bool()>& done) {
  return engines_.size() == 1 && engines_.front()->drive(until, wake_fd, done);
}

bool progress_pool::poll() {
  bool worked = false;
  for (const auto& engine : engines_) worked = engine->poll_once() || worked;
  return worked;
}

}  // namespace troupe::transport
