#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>

namespace troupe::actors {

/// Whether something that keeps ending is started once more: as in OTP, at most `most` times within
/// `within`. No clock in it: time is passed in and never goes back.
class restart_intensity {
 public:
  using clock = std::chrono::steady_clock;

  restart_intensity(std::uint32_t most, clock::duration within) noexcept
      : most_{most}, within_{within} {}

  /// It ended. False: once too often, give it up.
  [[nodiscard]] bool allows(clock::time_point now) {
    forget_before(now);
    if (ends_.size() <= most_) ends_.push_back(now);
    return ends_.size() <= most_;
  }
  /// How often it ended within the time before the last end, that one included; at most `most` + 1.
  [[nodiscard]] std::size_t ends() const noexcept { return ends_.size(); }
  [[nodiscard]] std::uint32_t most() const noexcept { return most_; }
  [[nodiscard]] clock::duration within() const noexcept { return within_; }

 private:
  void forget_before(clock::time_point now) {
    while (!ends_.empty() && now - ends_.front() >= within_) ends_.pop_front();
  }

  std::uint32_t most_;
  clock::duration within_;
  std::deque<clock::time_point> ends_;
};

}  // namespace troupe::actors
