#pragma once

/// Counts the allocations of the calling thread, and makes them fail. For tests that link
/// `troupe::allocations`, which replaces the allocator of the whole program.

#include <cstddef>
#include <optional>

namespace troupe::testing {

struct allocation_record {
  std::optional<std::size_t> left;  ///< allocations until all fail; empty: none fails
  bool once{false};                 ///< only one fails, and `left` is empty after it
  std::size_t made{0};
  std::size_t largest{0};  ///< in bytes, failed allocations included
};

extern thread_local allocation_record allocations;

}  // namespace troupe::testing
