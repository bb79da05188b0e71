#pragma once

#include <array>
#include <atomic>
#include <cstdint>

/// Shared by the tests and the library that is loaded before all others (`failing_calls.cpp`): how
/// many calls a program and its children have made, and which one fails.
namespace troupe::testing {

enum class call_kind : std::uint8_t { allocation, system_call };
inline constexpr std::array call_kinds{call_kind::allocation, call_kind::system_call};

/// Names the file that holds the `call_counts`.
inline constexpr const char* call_counts_variable = "TROUPE_CALL_COUNTS";
/// If set, the library writes a backtrace of the failing call to standard error.
inline constexpr const char* call_trace_variable = "TROUPE_CALL_TRACE";

/// In a file that all of them map: one count for a command and the processes that it starts, in
/// order of the calls.
struct call_counts {
  std::array<std::atomic<std::uint64_t>, call_kinds.size()> made{};
  /// Number of the call of that kind that fails, from 1. 0 if none does.
  std::array<std::uint64_t, call_kinds.size()> failing{};
  std::atomic<std::int32_t> failed_in{0};  ///< pid; 0 until the call fails
  std::array<char, 32> failed{};           ///< the call's name
};

}  // namespace troupe::testing
