#pragma once

#include <cstddef>
#include <deque>
#include <mutex>
#include <optional>

#include "troupe/kvcache/ids.hpp"
#include "troupe/transport/types.hpp"

namespace troupe::transport::xgmi {

/// Regions that the peer has deregistered and that are being closed here, or are closed and still
/// to be reported to the peer. Thread-safe.
class closed_regions {
 public:
  /// A region is about to be closed.
  void expect() {
    const std::lock_guard lock{mutex_};
    ++expected_;
  }
  /// An expected region has been closed.
  void put(region_id region) {
    const std::lock_guard lock{mutex_};
    --expected_;
    waiting_.push_back(region);
  }
  /// A closed region that has not been reported yet, if any.
  [[nodiscard]] std::optional<region_id> front() const {
    const std::lock_guard lock{mutex_};
    if (waiting_.empty()) return std::nullopt;
    return waiting_.front();
  }
  /// Removes the region that `front` returned. One caller at a time.
  void pop() {
    const std::lock_guard lock{mutex_};
    waiting_.pop_front();
  }
  [[nodiscard]] bool any() const {
    const std::lock_guard lock{mutex_};
    return !waiting_.empty();
  }
  /// Counts regions being closed and closed ones.
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
