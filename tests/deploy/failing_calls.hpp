#pragma once

#include <array>
#include <atomic>
#include <cstdint>

/// What tests and the library that is loaded before all others (`failing_calls.cpp`) share: how many
/// calls a program and those that it starts have made, and the one of them that fails.
namespace troupe::testing {

enum class call_kind : std::uint8_t { allocation, system_call };
inline constexpr std::array call_kinds{call_kind::allocation, call_kind::system_call};

/// Names the file that holds the `call_counts`.
inline constexpr const char* call_counts_variable = "TROUPE_CALL_COUNTS";
/// Where it is set, the library writes where the call that fails came from to standard error.
inline constexpr const char* call_trace_variable = "TROUPE_CALL_TRACE";

/// Lies in a file that is mapped by all of them: one count for a command and the processes that it
/// starts, whoever of them is the first.
struct call_counts {
  std::array<std::atomic<std::uint64_t>, call_kinds.size()> made{};
  /// The one of that kind that fails, from 1; 0: none does.
  std::array<std::uint64_t, call_kinds.size()> failing{};
  std::atomic<std::int32_t> failed_in{0};  ///< the process; 0: it has not come to it
  std::array<char, 32> failed{};           ///< the call's name
};

}  // namespace troupe::testing
