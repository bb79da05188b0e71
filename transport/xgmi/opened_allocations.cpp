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
  auto base = runtime_->open_memory(key.device, key.handle);
  if (!base) return fail(std::move(base).error());
  std::shared_ptr<const opened_allocation> made =
      std::make_shared<opened_allocation>(*runtime_, key.device, *base);
  if (const auto found = runtime_->find(*base); found && found->size < size) {
    return fail(errc::unauthorized, "the peer's allocation has " + std::to_string(found->size) +
                                        " bytes, it says " + std::to_string(size));
  }
  known_[key] = made;
  return made;
}

std::size_t opened_allocations::size() const {
  const std::lock_guard lock{mutex_};
  return static_cast<std::size_t>(
      std::ranges::count_if(known_, [](const auto& entry) { return !entry.second.expired(); }));
}

}  // namespace troupe::transport::xgmi
