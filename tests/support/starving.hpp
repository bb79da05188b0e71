#pragma once

/// Allocations that fail on purpose, on the thread that wants it. For tests that link `troupe::starving`, which replaces
/// the allocator of the whole program.

#include <cstddef>
#include <new>
#include <optional>

#include <gtest/gtest.h>

namespace troupe::testing {

/// Of this thread: how many are made until all fail; none: all are made.
extern thread_local std::optional<std::size_t> allocations_left;

/// Lets the first, then the second allocation of `call` fail, and so on, and looks at what is left each time.
template <class Call, class Look>
void starve(Call&& call, Look&& look) {
  for (std::size_t made = 0;; ++made) {
    SCOPED_TRACE(made);
    bool failed = false;
    allocations_left = made;
    try {
      call();
    } catch (const std::bad_alloc&) {
      failed = true;
    } catch (...) {
      allocations_left.reset();
      throw;
    }
    allocations_left.reset();
    if (!failed) return;
    look();
  }
}

}  // namespace troupe::testing
