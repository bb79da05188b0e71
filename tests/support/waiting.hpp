#pragma once

/// How long a test waits for what must come, and how it waits.

#include <chrono>
#include <thread>

#include "sanitized.hpp"

namespace troupe::testing {

/// The bound of every wait of a test, much longer than anything takes however busy the machine is: only a test that
/// fails waits for so long. What must come before something else does, such as a time-out that is not to be waited
/// for, is tested by making that other thing longer than this.
inline const std::chrono::seconds wait_limit{have_verbs() ? 120 : 60};

/// When a wait that begins now is given up.
inline std::chrono::steady_clock::time_point end_of_wait() {
  return std::chrono::steady_clock::now() + wait_limit;
}

/// Whether the condition comes true before a wait is given up. It is asked at once, and then after each pause.
template <class Condition>
bool comes_true(Condition&& holds, std::chrono::milliseconds pause = std::chrono::milliseconds{1}) {
  for (const auto end = end_of_wait(); !holds();) {
    if (std::chrono::steady_clock::now() >= end) return false;
    std::this_thread::sleep_for(pause);
  }
  return true;
}

}  // namespace troupe::testing
