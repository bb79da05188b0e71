/// \file
/// Adding a duration that an engine chose to a point in time.

#pragma once

#include <chrono>

namespace troupe::kvcache {

/// now + length, clamped to the maximum: an engine may ask for more than a clock can count.
[[nodiscard]] inline std::chrono::steady_clock::time_point after(
    std::chrono::steady_clock::time_point now, std::chrono::steady_clock::duration length) {
  const auto end = std::chrono::steady_clock::time_point::max();
  return length > end - now ? end : now + length;
}

}  // namespace troupe::kvcache
