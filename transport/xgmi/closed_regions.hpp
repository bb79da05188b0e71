#pragma once

#include <cstddef>
#include <deque>
#include <mutex>
#include <optional>

#include "troupe/kvcache/ids.hpp"
#include "troupe/transport/types.hpp"

namespace troupe::transport::xgmi {

/// Regions of a peer that it has deregistered and that are closed here: it is to be told. Thread-safe.
class closed_regions {
 public:
  void put(region_id region) {
    const std::lock_guard lock{mutex_};
    waiting_.push_back(region);
  }
  [[nodiscard]] std::optional<region_id> front() const {
    const std::lock_guard lock{mutex_};
    if (waiting_.empty()) return std::nullopt;
    return waiting_.front();
  }
  /// Of one that `front` answered; one caller at a time.
  void pop() {
    const std::lock_guard lock{mutex_};
    waiting_.pop_front();
  }
  [[nodiscard]] std::size_t size() const {
    const std::lock_guard lock{mutex_};
    return waiting_.size();
  }

 private:
  mutable std::mutex mutex_;
  std::deque<region_id> waiting_;
};

}  // namespace troupe::transport::xgmi
