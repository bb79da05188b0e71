#include "troupe/actors/door/door_loop.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <exception>

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "troupe/transport/os_error.hpp"

namespace troupe::actors {

result<std::unique_ptr<door_loop>> door_loop::create() {
  owned_fd epoll{::epoll_create1(EPOLL_CLOEXEC)};
  owned_fd wake{::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)};
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = 0;
  if (!epoll || !wake || ::epoll_ctl(epoll.get(), EPOLL_CTL_ADD, wake.get(), &event) != 0) {
    return fail(errc::overloaded,
                "cannot make the loop of the cluster port: " + transport::what_errno(errno) +
                    "; allow the process more descriptors (ulimit -n)");
  }
  return std::unique_ptr<door_loop>{new door_loop{std::move(epoll), std::move(wake)}};
}

door_loop::door_loop(owned_fd epoll, owned_fd wake)
    : epoll_{std::move(epoll)}, wake_{std::move(wake)} {}

template <class Call>
void door_loop::guarded(const Call& what) const noexcept {
  try {
    try {
      what();
    } catch (const std::exception& thrown) {
      if (tell_) tell_(thrown.what());
    }
  } catch (...) {  // not a std::exception, or `tell_` threw
  }
}

void door_loop::run() {
  {
    const std::lock_guard lock{mutex_};
    thread_ = std::this_thread::get_id();
  }
  std::array<epoll_event, 64> events{};
  while (true) {
    {
      const std::lock_guard lock{mutex_};
      if (stopped_) return;
    }
    const int n =
        ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), wait_ms());
    for (int i = 0; i < std::max(n, 0); ++i) {
      const auto& event = events[static_cast<std::size_t>(i)];
      if (event.data.u64 == 0) {
        std::uint64_t count = 0;
        [[maybe_unused]] const auto got = ::read(wake_.get(), &count, sizeof count);
        continue;
      }
      const auto at = watched_.find(event.data.u64);
      if (at == watched_.end()) continue;  // an earlier event of this batch forgot it
      const auto keep = at->second;        // the call may forget its own watch
      guarded([&] { keep->what(event.events); });
    }
    run_due();
    run_posted();
  }
}

void door_loop::stop() noexcept {
  {
    const std::lock_guard lock{mutex_};
    stopped_ = true;
  }
  wake();
}

void door_loop::post(call what) {
  bool first = false;
  {
    const std::lock_guard lock{mutex_};
    first = posted_.empty();
    posted_.push_back(std::move(what));
  }
  if (first) wake();  // otherwise the loop is awake or was woken already
}

void door_loop::wake() const noexcept {
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto sent = ::write(wake_.get(), &one, sizeof one);
}

void door_loop::run_posted() {
  std::vector<call> now;
  {
    const std::lock_guard lock{mutex_};
    now.swap(posted_);
  }
  for (const auto& what : now) guarded(what);
}

bool door_loop::on_its_thread() const noexcept {
  const std::lock_guard lock{mutex_};
  return thread_ == std::this_thread::get_id();
}

door_loop::id door_loop::watch(int fd, std::uint32_t events, events_call what) {
  const id made = ++last_id_;
  epoll_event event{};
  event.events = events;
  event.data.u64 = made;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) return 0;
  watched_.emplace(made, std::make_shared<watched>(watched{fd, events, std::move(what)}));
  return made;
}

void door_loop::change(id which, std::uint32_t events) {
  const auto at = watched_.find(which);
  if (at == watched_.end() || at->second->events == events) return;
  at->second->events = events;
  epoll_event event{};
  event.events = events;
  event.data.u64 = which;
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, at->second->fd, &event);
}

void door_loop::forget(id& which) {
  const auto at = watched_.find(std::exchange(which, 0));
  if (at == watched_.end()) return;
  epoll_event event{};
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, at->second->fd, &event);
  watched_.erase(at);
}

door_loop::id door_loop::call_at(clock::time_point when, call what) {
  const id made = ++last_id_;
  timers_.emplace(std::pair{when, made}, std::move(what));
  timer_times_.emplace(made, when);
  return made;
}

void door_loop::cancel(id& timer) {
  const auto at = timer_times_.find(std::exchange(timer, 0));
  if (at == timer_times_.end()) return;
  timers_.erase({at->second, at->first});
  timer_times_.erase(at);
}

int door_loop::wait_ms() const {
  if (timers_.empty()) return -1;
  const auto left = timers_.begin()->first.first - clock::now();
  if (left <= clock::duration::zero()) return 0;
  // Rounded up: waking early would only mean waiting again.
  const auto ms = std::chrono::ceil<std::chrono::milliseconds>(left).count();
  return static_cast<int>(std::min<std::int64_t>(ms, 60'000));
}

void door_loop::run_due() {
  const auto now = clock::now();
  while (!timers_.empty() && timers_.begin()->first.first <= now) {
    auto due = timers_.extract(timers_.begin());
    timer_times_.erase(due.key().second);
    guarded(due.mapped());
  }
}

}  // namespace troupe::actors
