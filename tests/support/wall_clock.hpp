#pragma once

#include <algorithm>
#include <chrono>

namespace troupe::testing {

/// Detects that the wall clock is set while a test runs, which makes timestamps meaningless.
class wall_clock_watch {
 public:
  /// Whether the clock was set since this object was created.
  [[nodiscard]] bool was_set() const {
    const auto moved = ahead_of_steady() - before_;
    return moved > tolerance || moved < -tolerance;
  }

 private:
  using nanoseconds = std::chrono::nanoseconds;
  /// More than a clock is slewed during a test.
  static constexpr nanoseconds tolerance = std::chrono::milliseconds{50};

  /// The smallest of a few readings: the thread may be descheduled between reading the two clocks.
  static nanoseconds ahead_of_steady() {
    auto least = nanoseconds::max();
    for (int look = 0; look < 10; ++look) {
      const auto steady = std::chrono::steady_clock::now().time_since_epoch();
      const auto wall = std::chrono::system_clock::now().time_since_epoch();
      least = std::min(least, std::chrono::duration_cast<nanoseconds>(wall) -
                                  std::chrono::duration_cast<nanoseconds>(steady));
    }
    return least;
  }

  nanoseconds before_{ahead_of_steady()};
};

}  // namespace troupe::testing
