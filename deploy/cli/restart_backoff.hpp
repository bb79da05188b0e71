#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <optional>

#include "troupe/actors/base/restart_intensity.hpp"

namespace troupe::deploy::cli {

/// When `troupe up` restarts a failed node. Has no clock: time is passed in.
///
///     started --up--> up --ended--> waits for `delay` --> started
///     started --------ended-------> waits for `delay` --> started
///     ended for the 6th time within 60 s: given up
///
/// The delay doubles from end to end, and starts over after the node has been up for a minute.
class restart_backoff {
 public:
  using clock = std::chrono::steady_clock;
  static constexpr std::chrono::milliseconds first_delay{100};
  static constexpr std::chrono::milliseconds longest_delay{10'000};
  static constexpr std::chrono::seconds good_life{60};
  static constexpr std::uint32_t most_restarts{5};
  static constexpr std::chrono::seconds counted_within{60};

  /// The cluster has registered the node. Counts once a life.
  void up(clock::time_point now) noexcept {
    if (!up_since_) up_since_ = now;
  }
  /// The node ended, or could not be started. Returns the time until the next start; empty to give
  /// up.
  [[nodiscard]] std::optional<std::chrono::milliseconds> ended(clock::time_point now) {
    if (up_since_ && now - *up_since_ >= good_life) next_ = first_delay;
    up_since_.reset();
    if (!intensity_.allows(now)) return std::nullopt;
    const auto delay = next_;
    next_ = std::min(2 * next_, longest_delay);
    return delay;
  }
  /// The number of ends within the minute up to the last end, including it.
  [[nodiscard]] std::size_t ends() const noexcept { return intensity_.ends(); }

 private:
  actors::restart_intensity intensity_{most_restarts, counted_within};
  std::chrono::milliseconds next_{first_delay};
  std::optional<clock::time_point> up_since_;
};

}  // namespace troupe::deploy::cli
