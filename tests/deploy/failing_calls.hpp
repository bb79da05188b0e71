#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

/// Shared by the tests and the library that is loaded before all others (`failing_calls.cpp`): how
/// often a program and its children have called from each place, and which of the calls fails.
namespace troupe::testing {

enum class call_kind : std::uint8_t { allocation, system_call };
inline constexpr std::array call_kinds{call_kind::allocation, call_kind::system_call};

/// Names the file that holds the `call_counts`.
inline constexpr const char* call_counts_variable = "TROUPE_CALL_COUNTS";
/// If set, the library writes a backtrace of the failing call to standard error.
inline constexpr const char* call_trace_variable = "TROUPE_CALL_TRACE";

/// All calls of one kind with the same stack, in processes of the same role (the node's name, or
/// none: the command itself).
struct call_place {
  std::atomic<std::uint64_t> stack{0};  ///< a hash, the same in every run of a build; 0: free
  std::atomic<std::uint32_t> calls{0};
  std::atomic<bool> spared{false};  ///< its calls never fail
  std::uint32_t role{0};            ///< a hash
};

/// In a file that all of them map.
struct call_counts {
  static constexpr std::size_t most_places = std::size_t{1} << 16U;
  call_kind kind{};  ///< the calls that are looked at
  std::array<call_place, most_places> places{};
  /// The call that fails: its place, 0 if none does, and its number there, from 1.
  std::uint64_t failing_stack{0};
  std::uint32_t failing_role{0};
  std::uint32_t failing_call{1};
  std::atomic<std::int32_t> failed_in{0};  ///< pid; 0 until the call fails
  std::array<char, 32> failed{};           ///< the call's name
  std::array<char, 32> failed_role{};
};

}  // namespace troupe::testing
