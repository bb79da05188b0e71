#pragma once

#include <cstddef>
#include <deque>
#include <unordered_set>

#include "troupe/kvcache/ids.hpp"

namespace troupe::transport {

/// The last thousands of transfers that ended on a link. A forgotten transfer has no grant and no
/// batch left, so forgetting it matters only to a caller that continues the transfer after
/// thousands of others. Not thread-safe.
class recent_transfers {
 public:
  static constexpr std::size_t capacity = 16'384;

  void add(transfer_id transfer) {
    if (!known_.insert(transfer).second) return;
    by_age_.push_back(transfer);
    if (by_age_.size() <= capacity) return;
    known_.erase(by_age_.front());
    by_age_.pop_front();
  }
  [[nodiscard]] bool contains(transfer_id transfer) const { return known_.contains(transfer); }

 private:
  std::unordered_set<transfer_id> known_;
  std::deque<transfer_id> by_age_;
};

}  // namespace troupe::transport
