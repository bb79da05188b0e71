#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

namespace troupe::deploy::cli {

/// How long a supervisor that begins on demand has not been needed: no node was registered, and no
/// process asked for a name. A process that asks for a name counts as long as the name is held for
/// it: until it has the name, and between two questions, it is no node, and it would begin the next
/// supervisor.
class idle_time {
 public:
  using milliseconds = std::chrono::milliseconds;
  using time_point = std::chrono::steady_clock::time_point;

  idle_time(milliseconds limit, milliseconds claim_lasts)
      : limit_{limit}, claim_limit_{std::max(limit, claim_lasts)} {}

  /// The supervisor keeps this count current.
  [[nodiscard]] const std::shared_ptr<std::atomic<std::size_t>>& nodes() const { return nodes_; }
  [[nodiscard]] const std::shared_ptr<std::atomic<std::uint64_t>>& claims() const {
    return claims_;
  }

  /// The supervisor can be found from now on.
  void begin(time_point now) { since_ = now; }
  /// Poll this.
  [[nodiscard]] bool is_over(time_point now) {
    if (*nodes_ != 0) since_ = now;
    if (const auto asked = claims_->load(); asked != claims_seen_) {
      claims_seen_ = asked;
      claimed_ = now;
    }
    return now - since_ >= limit_ && (!claimed_ || now - *claimed_ >= claim_limit_);
  }
  /// Whether no node or process has come since `is_over` was called.
  [[nodiscard]] bool is_still() const { return *nodes_ == 0 && *claims_ == claims_seen_; }

 private:
  milliseconds limit_;
  milliseconds claim_limit_;
  std::shared_ptr<std::atomic<std::size_t>> nodes_{std::make_shared<std::atomic<std::size_t>>(0)};
  std::shared_ptr<std::atomic<std::uint64_t>> claims_{
      std::make_shared<std::atomic<std::uint64_t>>(0)};
  std::uint64_t claims_seen_{0};
  time_point since_{std::chrono::steady_clock::now()};
  std::optional<time_point> claimed_;
};

}  // namespace troupe::deploy::cli
