#include "troupe/transport/xgmi/opened_allocations.hpp"

#include <algorithm>
#include <string>
#include <utility>

namespace troupe::transport::xgmi {

result<std::shared_ptr<const opened_allocation>> opened_allocations::open(const allocation_key& key,
                                                                          std::uint64_t size) {
  // Held while the driver opens: two threads must not open the same one.
  const std::lock_guard lock{mutex_};
  std::erase_if(known_, [](const auto& entry) { return entry.second.expired(); });
  if (const auto at = known_.find(key); at != known_.end()) {
    if (auto open = at->second.lock()) return open;
  }
  result<std::byte*> base = take_back(key);
  if (*base == nullptr) base = runtime_->open_memory(key.device, key.handle);
  if (!base) return fail(std::move(base).error());
  std::shared_ptr<const opened_allocation> made =
      std::make_shared<opened_allocation>(*this, key, *base);
  if (const auto found = runtime_->find(*base); found && found->size < size) {
    return fail(errc::unauthorized, "the peer's allocation has " + std::to_string(found->size) +
                                        " bytes, it says " + std::to_string(size));
  }
  known_[key] = made;
  return made;
}

opened_allocation::~opened_allocation() {
  all_->close(key_, base_);
}

std::byte* opened_allocations::take_back(const allocation_key& key) {
  const std::lock_guard lock{closing_mutex_};
  const auto at = std::ranges::find(to_close_, key, &left_open::key);
  if (at == to_close_.end()) return nullptr;
  auto* const base = at->base;
  to_close_.erase(at);
  return base;
}

void opened_allocations::close(const allocation_key& key, std::byte* base) {
  {
    const std::lock_guard lock{closing_mutex_};
    to_close_.push_back({key, base});
  }
  close_what_can_be();
  {
    const std::lock_guard lock{closing_mutex_};
    if (to_close_.empty() || std::exchange(closing_late_, true)) return;
  }
  late_.give([this] { go_on_closing(); });
}

/// Streams are held for as long as a transfer takes: looks now and then whether one still is.
void opened_allocations::go_on_closing() {
  std::unique_lock lock{closing_mutex_};
  while (!to_close_.empty() && !ending_) {
    changed_.wait_for(lock, look_every, [this] { return ending_; });
    lock.unlock();
    close_what_can_be();
    lock.lock();
  }
  closing_late_ = false;
}

opened_allocations::~opened_allocations() {
  {
    const std::lock_guard lock{closing_mutex_};
    ending_ = true;
  }
  changed_.notify_all();
  close_what_can_be();
}

void opened_allocations::close_what_can_be() {
  std::vector<left_open> mine;
  {
    const std::lock_guard lock{closing_mutex_};
    mine = std::exchange(to_close_, {});
  }
  std::erase_if(mine, [this](const left_open& one) {
    return gates_->unless_held(one.key.device,
                               [&] { runtime_->close_memory(one.key.device, one.base); });
  });
  const std::lock_guard lock{closing_mutex_};
  to_close_.insert(to_close_.end(), mine.begin(), mine.end());
}

std::size_t opened_allocations::size() const {
  const std::lock_guard lock{mutex_};
  return static_cast<std::size_t>(
      std::ranges::count_if(known_, [](const auto& entry) { return !entry.second.expired(); }));
}

}  // namespace troupe::transport::xgmi
