#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>

namespace troupe::actors {

/// Whether to restart something that keeps ending: at most `most` times within `within`, as in OTP.
/// Has no clock: time is passed in and never goes back.
class restart_intensity {
 public:
  using clock = std::chrono::steady_clock;

  restart_intensity(std::uint32_t most, clock::duration within) noexcept
      : most_{most}, within_{within} {}

  /// Counts an end. Returns false if it was one too many: give it up.
  [[nodiscard]] bool allows(clock::time_point now) {
    while (!ends_.empty() && now - ends_.front() >= within_) ends_.pop_front();
    if (ends_.size() <= most_) ends_.push_back(now);
    return ends_.size() <= most_;
  }
  /// The number of ends within the time before the last one, including it; at most `most` + 1.
  [[nodiscard]] std::size_t ends() const noexcept { return ends_.size(); }
  [[nodiscard]] std::uint32_t most() const noexcept { return most_; }
  [[nodiscard]] clock::duration within() const noexcept { return within_; }

 private:
  std::uint32_t most_;
  clock::duration within_;
  std::deque<clock::time_point> ends_;
};

}  // namespace troupe::actors
