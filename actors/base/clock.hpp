#pragma once

#include <chrono>

namespace troupe::actors {

/// Monotonic.
using time_point = std::chrono::steady_clock::time_point;

}  // namespace troupe::actors
