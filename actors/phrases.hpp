#pragma once

/// How counts, times and errors of the system stand in sentences for people.

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <system_error>

namespace troupe::actors {

/// "1 transfer", "3 transfers".
[[nodiscard]] inline std::string count_of(std::uint64_t n, std::string_view what) {
  return std::to_string(n) + " " + std::string{what} + (n == 1 ? "" : "s");
}

/// "5 s", "1500 ms".
[[nodiscard]] inline std::string time_text(std::chrono::milliseconds time) {
  const auto ms = time.count();
  return ms % 1000 == 0 ? std::to_string(ms / 1000) + " s" : std::to_string(ms) + " ms";
}

/// What an `errno` means.
[[nodiscard]] inline std::string errno_text(int number) {
  return std::generic_category().message(number);
}

}  // namespace troupe::actors
