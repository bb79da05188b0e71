#pragma once

/// What a test knows of the allocations of its thread, and which of them fail. For tests that link
/// `troupe::allocations`, which replaces the allocator of the whole program.

#include <cstddef>
#include <optional>

namespace troupe::testing {

struct allocation_record {
  std::optional<std::size_t> left;  ///< how many are made until all fail; none: all are made
  std::size_t made{0};
  std::size_t largest{0};  ///< in bytes, also of those that failed
};

extern thread_local allocation_record allocations;

}  // namespace troupe::testing
