#pragma once

#include <cstddef>
#include <deque>
#include <mutex>
#include <optional>

#include "troupe/kvcache/ids.hpp"
#include "troupe/transport/types.hpp"

namespace troupe::transport::xgmi {

/// Regions of a peer that it has deregistered and that are being closed here, or are closed: it is to
/// be told of these. Thread-safe.
class closed_regions {
 public:
  /// One more is being closed.
  void expect() {
    const std::lock_guard lock{mutex_};
    ++expected_;
  }
  /// One of those is closed.
  void put(region_id region) {
    const std::lock_guard lock{mutex_};
    --expected_;
    waiting_.push_back(region);
  }
  /// One that is closed.
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
  [[nodiscard]] bool any() const {
    const std::lock_guard lock{mutex_};
    return !waiting_.empty();
  }
  /// Closed or not.
  [[nodiscard]] std::size_t size() const {
    const std::lock_guard lock{mutex_};
    return expected_ + waiting_.size();
  }

 private:
  mutable std::mutex mutex_;
  std::size_t expected_{0};
  std::deque<region_id> waiting_;
};

}  // namespace troupe::transport::xgmi
