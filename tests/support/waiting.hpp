#pragma once

/// How long a test waits for what must come, and how it waits.

#include <chrono>
#include <thread>

#include "sanitized.hpp"

namespace troupe::testing {

/// The bound of every wait in a test, much longer than anything takes on a busy machine: only a
/// failing test waits this long. If something must happen before another event, such as a time-out,
/// the test makes that event later than this bound.
inline const std::chrono::seconds wait_limit{have_verbs() ? 120 : 60};

/// When a wait that begins now gives up.
inline std::chrono::steady_clock::time_point end_of_wait() {
  return std::chrono::steady_clock::now() + wait_limit;
}

/// Returns whether the condition comes true within `wait_limit`. Checks it at once, then after each
/// pause.
template <class Condition>
bool comes_true(Condition&& holds, std::chrono::milliseconds pause = std::chrono::milliseconds{1}) {
  for (const auto end = end_of_wait(); !holds();) {
    if (std::chrono::steady_clock::now() >= end) return false;
    std::this_thread::sleep_for(pause);
  }
  return true;
}

}  // namespace troupe::testing
