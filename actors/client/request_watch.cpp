#include "troupe/actors/client/request_watch.hpp"

#include <chrono>
#include <utility>

namespace troupe::actors {

namespace {

/// The interval between two looks at the membership.
constexpr std::chrono::milliseconds look_interval{100};

/// If more ends pile up, the supervisor forgets the requests by itself, because it bounds its
/// memory of them.
constexpr std::size_t max_untold_ends = 65'536;

}  // namespace

request_watch::request_watch(cluster_client& client)
    : client_{client}, thread_{[this] { run(); }} {}

request_watch::~request_watch() {
  {
    const std::lock_guard lock{mutex_};
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void request_watch::begin() {
  {
    const std::lock_guard lock{mutex_};
    ++requests_;
  }
  changed_.notify_all();
}

void request_watch::end() {
  const std::lock_guard lock{mutex_};
  --requests_;
}

std::shared_ptr<const membership> request_watch::asked_after(
    std::chrono::steady_clock::time_point then) const {
  static const auto nothing = std::make_shared<const membership>();
  const std::lock_guard lock{mutex_};
  return asked_ > then ? newest_ : nothing;
}

void request_watch::tell_later(std::string request) {
  {
    const std::lock_guard lock{mutex_};
    untold_.push_back(std::move(request));
    if (untold_.size() > max_untold_ends) untold_.pop_front();
  }
  changed_.notify_all();
}

void request_watch::run() {
  std::unique_lock lock{mutex_};
  for (;;) {
    changed_.wait(lock, [this] { return stopping_ || requests_ > 0 || !untold_.empty(); });
    if (stopping_) return;
    lock.unlock();
    const auto asked = std::chrono::steady_clock::now();
    auto members = client_.members();
    lock.lock();
    if (members) {
      newest_ = std::make_shared<const membership>(std::move(*members));
      asked_ = asked;
      tell_now(lock);
    }
    changed_.wait_for(lock, look_interval, [this] { return stopping_; });
  }
}

/// Tells a supervisor that answers which requests are over. Requests that it does not confirm stay
/// queued, and so do those beyond the time limit: the requests being carried need news of the
/// members.
void request_watch::tell_now(std::unique_lock<std::mutex>& lock) {
  const auto until = std::chrono::steady_clock::now() + look_interval;
  while (!untold_.empty() && !stopping_ && std::chrono::steady_clock::now() < until) {
    const auto request = untold_.front();
    lock.unlock();
    const bool told = client_.finished(request).has_value();
    lock.lock();
    if (!told) return;
    if (!untold_.empty() && untold_.front() == request) untold_.pop_front();
  }
}

side_threads::~side_threads() {
  std::list<one> all;  // joined after the lock is released, which the threads take
  const std::lock_guard lock{mutex_};
  all.swap(all_);
}

void side_threads::run(std::function<void()> what) {
  std::list<one> ended;  // joined after the lock is released
  const std::lock_guard lock{mutex_};
  for (auto it = all_.begin(); it != all_.end();) {
    const auto current = it++;
    if (current->ended) ended.splice(ended.end(), all_, current);
  }
  auto& mine = all_.emplace_back();
  try {
    mine.thread = std::jthread{[this, &mine, what = std::move(what)] {
      what();
      const std::lock_guard ends{mutex_};
      mine.ended = true;
    }};
  } catch (...) {
    all_.pop_back();
    throw;
  }
}

}  // namespace troupe::actors
