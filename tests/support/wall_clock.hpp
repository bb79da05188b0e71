#pragma once

#include <algorithm>
#include <chrono>

namespace troupe::testing {

/// Tells of a wall clock that is set while a test runs: what it shows then proves nothing.
class wall_clock_watch {
 public:
  /// Since this object was made.
  [[nodiscard]] bool was_set() const {
    const auto moved = ahead_of_steady() - before_;
    return moved > tolerance || moved < -tolerance;
  }

 private:
  using nanoseconds = std::chrono::nanoseconds;
  /// More than a clock is slewed within a test.
  static constexpr nanoseconds tolerance = std::chrono::milliseconds{50};

  /// The least of a few looks: between the two clocks this thread may have to wait for its turn.
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
