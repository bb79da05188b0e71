#include "troupe/transport/progress_engine.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <string>
#include <system_error>

#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

namespace troupe::transport {

namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr std::uint64_t wake_id = 0;    // watches count from 1
constexpr milliseconds caller_hold{1};  // how long after a caller's poll the thread stands aside
constexpr std::uint32_t rounds_per_events = 8;  // polling rounds between two looks at epoll
constexpr milliseconds for_ever{-1};

std::int64_t nanoseconds(steady_time t) {
  return t.time_since_epoch().count();
}

}  // namespace

result<std::unique_ptr<progress_engine>> progress_engine::create(settings with) {
  const auto refused = [](const char* call) {
    return fail(errc::pool_exhausted, std::string{"progress engine: "} + call + ": " +
                                          std::system_category().message(errno) +
                                          "; raise the limit of open files");
  };
  const int epoll_fd = ::epoll_create1(EPOLL_CLOEXEC);
  if (epoll_fd < 0) return refused("epoll_create1");
  const int wake_fd = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (wake_fd < 0) {
    auto said = refused("eventfd");
    ::close(epoll_fd);
    return said;
  }
  const int kick_fd = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (kick_fd < 0) {
    auto said = refused("eventfd");
    ::close(wake_fd);
    ::close(epoll_fd);
    return said;
  }
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = wake_id;
  if (::epoll_ctl(epoll_fd, EPOLL_CTL_ADD, wake_fd, &event) != 0) {
    auto said = refused("epoll_ctl");
    ::close(kick_fd);
    ::close(wake_fd);
    ::close(epoll_fd);
    return said;
  }
  std::unique_ptr<progress_engine> made{
      new progress_engine(std::move(with), epoll_fd, wake_fd, kick_fd)};
  if (made->with_.own_thread) {
    made->thread_ = std::thread{[engine = made.get()] { engine->run(); }};
  }
  return made;
}

progress_engine::progress_engine(settings with, int epoll_fd, int wake_fd, int kick_fd)
    : with_{std::move(with)}, epoll_fd_{epoll_fd}, wake_fd_{wake_fd}, kick_fd_{kick_fd} {}

void progress_engine::stop() {
  if (!thread_.joinable()) return;
  stopping_.store(true, std::memory_order_seq_cst);
  woken_.store(false, std::memory_order_seq_cst);
  wake();
  thread_.join();
}

progress_engine::~progress_engine() {
  stop();
  ::close(kick_fd_);
  ::close(wake_fd_);
  ::close(epoll_fd_);
}

// -- registration
// -----------------------------------------------------------------------------------

result<watch_id> progress_engine::watch(int fd, std::uint32_t events, std::shared_ptr<pollable> who,
                                        std::uint64_t key) {
  const std::lock_guard lock{mutex_};
  const auto id = ++last_watch_;
  epoll_event event{};
  event.events = events;
  event.data.u64 = id;
  if (::epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, fd, &event) != 0) {
    return fail(errc::overloaded,
                "cannot watch a descriptor: epoll_ctl: " + std::system_category().message(errno));
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
  ::epoll_ctl(epoll_fd_, EPOLL_CTL_MOD, at->second.fd, &event);
}

void progress_engine::unwatch(watch_id id) {
  std::shared_ptr<pollable> released;  // may be the last owner: destroyed after the lock
  const std::lock_guard lock{mutex_};
  const auto at = watches_.find(id.value);
  if (at == watches_.end()) return;
  ::epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, at->second.fd, nullptr);
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
    const auto at =
        timers_.emplace(std::pair{when, id}, timer_entry{when, std::move(who), key}).first;
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
  const std::uint64_t one = 1;
  // Cannot fail but by a full counter, which wakes as well.
  [[maybe_unused]] const auto written = ::write(wake_fd_, &one, sizeof one);
}

// -- rounds
// -------------------------------------------------------------------------------------------

void progress_engine::caller_polls() noexcept {
  const auto now = nanoseconds(steady_clock::now());
  const auto before = caller_ns_.exchange(now, std::memory_order_acq_rel);
  if (now - before < std::chrono::nanoseconds{caller_hold}.count() || !with_.own_thread) return;
  // It begins to poll. The thread, asleep until the next event, must be there when it stops: what
  // the caller left half done (an acknowledgement that waits for company) is then the thread's to
  // finish.
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(kick_fd_, &one, sizeof one);
}

bool progress_engine::poll_once() {
  caller_polls();
  return run_round(milliseconds{0});
}

bool progress_engine::run_round(milliseconds sleep) {
  if (running_.exchange(true, std::memory_order_acquire)) return false;
  const bool worked = round(sleep);
  running_.store(false, std::memory_order_release);
  if (worked && with_.after_progress) with_.after_progress();
  return worked;
}

// The thread. Polls while there was work within `spin`, sleeps else.
void progress_engine::run() {
  auto last_work = steady_clock::now();
  while (!stopping_.load(std::memory_order_acquire)) {
    const auto now = steady_clock::now();
    const auto caller = caller_ns_.load(std::memory_order_acquire);
    if (nanoseconds(now) - caller < std::chrono::nanoseconds{caller_hold}.count()) {
      stand_aside();
      last_work = steady_clock::now();
      continue;
    }
    const bool may_sleep = now - last_work >= with_.spin;
    if (run_round(may_sleep ? for_ever : milliseconds{0})) last_work = steady_clock::now();
  }
}

// A caller polls. Sleep where no traffic wakes us, and look again after the time for which its last
// call counts.
void progress_engine::stand_aside() {
  pollfd nothing{};
  nothing.fd = -1;
  ::poll(&nothing, 1, static_cast<int>(caller_hold.count()));
}

bool progress_engine::round(milliseconds sleep) {
  refresh_pollers();
  auto now = steady_clock::now();
  bool worked = poll_pollers(now);
  if (!worked && sleep != milliseconds{0} && prepare_sleep()) {
    // `running_` is given up while asleep, so that a caller's poll can go on meanwhile.
    const auto timeout = until_timer(now);
    running_.store(false, std::memory_order_release);
    std::array<pollfd, 2> readable{};
    readable[0] = {epoll_fd_, POLLIN, 0};
    readable[1] = {kick_fd_, POLLIN, 0};
    ::poll(readable.data(), readable.size(), static_cast<int>(timeout.count()));
    if (readable[1].revents != 0) {
      std::uint64_t count = 0;
      [[maybe_unused]] const auto got = ::read(kick_fd_, &count, sizeof count);
    }
    bool expected = false;
    if (!running_.compare_exchange_strong(expected, true, std::memory_order_acquire)) {
      // A caller took over. `run_round` will store false; wait for its round to end first.
      while (running_.exchange(true, std::memory_order_acquire)) std::this_thread::yield();
    }
    end_sleep();
    worked = take_events(0);
    now = steady_clock::now();
  } else if (round_pollers_.empty() || ++rounds_since_events_ >= rounds_per_events) {
    worked = take_events(0) || worked;
  }
  if (nanoseconds(now) >= next_timer_ns_.load(std::memory_order_acquire)) {
    worked = run_timers(now) || worked;
  }
  return worked;
}

bool progress_engine::take_events(int timeout_ms) {
  rounds_since_events_ = 0;
  std::array<epoll_event, 64> events{};
  const int count =
      ::epoll_wait(epoll_fd_, events.data(), static_cast<int>(events.size()), timeout_ms);
  bool worked = false;
  for (int i = 0; i < count; ++i) {
    const auto id = events[static_cast<std::size_t>(i)].data.u64;
    if (id == wake_id) {
      drain_wake();
      worked = true;  // whoever woke us wants rounds: poll for a while
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
  woken_.store(false, std::memory_order_seq_cst);
  std::uint64_t count = 0;
  [[maybe_unused]] const auto got = ::read(wake_fd_, &count, sizeof count);
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

milliseconds progress_engine::until_timer(steady_time now) const {
  const auto next = next_timer_ns_.load(std::memory_order_acquire);
  if (next == INT64_MAX) return for_ever;
  const auto left = next - nanoseconds(now);
  if (left <= 0) return milliseconds{0};
  return milliseconds{std::min<std::int64_t>(left / 1'000'000 + 1, 60'000)};
}

// -- pollers
// ------------------------------------------------------------------------------------------

void progress_engine::refresh_pollers() {
  if (round_pollers_version_ == pollers_version_.load(std::memory_order_acquire)) return;
  std::vector<std::shared_ptr<pollable>> fresh;
  {
    const std::lock_guard lock{mutex_};
    fresh = pollers_;
    round_pollers_version_ = pollers_version_.load(std::memory_order_acquire);
  }
  round_pollers_.swap(fresh);  // those that were removed die here, without the lock
}

bool progress_engine::poll_pollers(steady_time now) {
  bool worked = false;
  for (const auto& who : round_pollers_) worked = who->on_poll(now) || worked;
  return worked;
}

bool progress_engine::prepare_sleep() {
  for (std::size_t i = 0; i < round_pollers_.size(); ++i) {
    if (round_pollers_[i]->before_sleep()) continue;
    for (std::size_t armed = 0; armed <= i; ++armed) round_pollers_[armed]->after_sleep();
    return false;
  }
  return true;
}

void progress_engine::end_sleep() {
  for (const auto& who : round_pollers_) who->after_sleep();
}

// -- the pool
// ---------------------------------------------------------------------------------------------

result<std::unique_ptr<progress_pool>> progress_pool::create(
    std::uint32_t num_workers, std::chrono::microseconds spin,
    const std::function<void()>& after_progress) {
  std::unique_ptr<progress_pool> pool{new progress_pool};
  for (std::uint32_t i = 0; i < std::max<std::uint32_t>(num_workers, 1); ++i) {
    auto engine = progress_engine::create(
        {.own_thread = num_workers != 0, .spin = spin, .after_progress = after_progress});
    if (!engine) return fail(std::move(engine).error());
    pool->engines_.push_back(std::move(*engine));
  }
  return pool;
}

void progress_pool::stop() {
  for (const auto& engine : engines_) engine->stop();
}

bool progress_pool::poll() {
  bool worked = false;
  for (const auto& engine : engines_) worked = engine->poll_once() || worked;
  return worked;
}

}  // namespace troupe::transport
