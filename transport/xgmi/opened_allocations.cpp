#include "troupe/transport/xgmi/opened_allocations.hpp"

#include <algorithm>
#include <set>
#include <string>
#include <system_error>
#include <utility>

namespace troupe::transport::xgmi {

opened_allocation::~opened_allocation() {
  all_->leave(key_, use_);
}

// -- opening

result<std::shared_ptr<const opened_allocation>> opened_allocations::open(const allocation_key& key,
                                                                          std::uint64_t size) {
  std::vector<waiter> told;  // destroyed, and so notified, after the lock is released
  std::shared_ptr<const opened_allocation> made;
  std::unique_lock lock{mutex_};
  changed_.wait(lock, [&] {
    const auto at = known_.find(key);
    return at == known_.end() || !at->second.with_driver;
  });
  auto& known = known_[key];
  made = known.user.lock();
  if (!made && known.base != nullptr) {
    made = use(key, known);
    std::erase(left_, key);
    told = std::exchange(known.waiters, {});
  }
  if (!made) {
    known.with_driver = true;
    lock.unlock();
    auto base = runtime_->open_memory(key.device, key.handle);
    const auto found = base ? runtime_->find(*base) : std::nullopt;
    lock.lock();
    known.with_driver = false;
    changed_.notify_all();
    if (!base) {
      known_.erase(key);
      return fail(std::move(base).error());
    }
    known.base = *base;
    known.size = found ? found->size : UINT64_MAX;
    made = use(key, known);
  }
  // Check on every call: another region of the peer may claim more of the same allocation.
  if (known.size < size) {
    return fail(errc::unauthorized, "the peer's allocation has " + std::to_string(known.size) +
                                        " bytes, it says " + std::to_string(size));
  }
  return made;
}

/// Under the lock.
std::shared_ptr<const opened_allocation> opened_allocations::use(const allocation_key& key,
                                                                 entry& what) {
  what.use = ++last_use_;
  auto made = std::make_shared<const opened_allocation>(*this, key, what.base, what.use);
  what.user = made;
  return made;
}

std::size_t opened_allocations::size() const {
  const std::lock_guard lock{mutex_};
  return static_cast<std::size_t>(
      std::ranges::count_if(known_, [](const auto& one) { return !one.second.user.expired(); }));
}

// -- closing

void opened_allocations::after_closing(const allocation_key& of, std::function<void()> then) {
  // Declared before the lock: if no entry keeps it, it is destroyed, and so notifies, after
  // unlocking.
  const waiter told{nullptr, [then = std::move(then)](const void*) { then(); }};
  const std::lock_guard lock{mutex_};
  for (auto& [key, one] : known_) {
    const bool same = key.pid == of.pid && key.id == of.id && key.handle == of.handle;
    if (same && one.base != nullptr && one.user.expired()) one.waiters.push_back(told);
  }
}

/// Ends a use. Does nothing if the allocation was opened again in the meantime.
void opened_allocations::leave(const allocation_key& key, std::uint64_t use) {
  std::unique_lock lock{mutex_};
  const auto at = known_.find(key);
  if (at == known_.end() || at->second.use != use) return;
  left_.push_back(key);
  try {
    if (!closer_.joinable()) closer_ = std::thread{[this] { go_on_closing(); }};
  } catch (const std::system_error&) {
    // No thread available: close it here, even if that waits.
    close_what_can_be(lock);
  }
  changed_.notify_all();
}

void opened_allocations::go_on_closing() {
  std::unique_lock lock{mutex_};
  while (!ending_) {
    close_what_can_be(lock);
    if (left_.empty()) {
      changed_.wait(lock, [this] { return ending_ || !left_.empty(); });
    } else {
      changed_.wait_for(lock, look_every, [this] { return ending_; });
    }
  }
}

opened_allocations::~opened_allocations() {
  {
    const std::lock_guard lock{mutex_};
    ending_ = true;
  }
  changed_.notify_all();
  if (closer_.joinable()) closer_.join();
  std::unique_lock lock{mutex_};
  close_what_can_be(lock);
}

/// Called with `lock` held; releases it while the driver closes.
void opened_allocations::close_what_can_be(std::unique_lock<std::mutex>& lock) {
  std::set<std::uint32_t> held;
  while (true) {
    const auto next = std::ranges::find_if(
        left_, [&](const allocation_key& key) { return !held.contains(key.device); });
    if (next == left_.end()) return;
    const auto key = *next;
    left_.erase(next);
    auto& one = known_.at(key);
    one.with_driver = true;
    lock.unlock();
    const bool closed =
        gates_->unless_held(key.device, [&] { runtime_->close_memory(key.device, one.base); });
    lock.lock();
    one.with_driver = false;
    changed_.notify_all();
    if (!closed) {
      held.insert(key.device);
      left_.push_back(key);
      continue;
    }
    auto told = std::move(one.waiters);
    known_.erase(key);
    lock.unlock();
    told.clear();
    lock.lock();
  }
}

}  // namespace troupe::transport::xgmi
