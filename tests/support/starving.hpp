#pragma once

#include <cstddef>
#include <new>

#include <gtest/gtest.h>

#include "allocations.hpp"

namespace troupe::testing {

/// Runs `call` with its first allocation failing, then its second, and so on, and calls `look`
/// after each run.
template <class Call, class Look>
void starve(Call&& call, Look&& look) {
  for (std::size_t made = 0;; ++made) {
    SCOPED_TRACE(made);
    bool failed = false;
    allocations.left = made;
    try {
      call();
    } catch (const std::bad_alloc&) {
      failed = true;
    } catch (...) {
      allocations.left.reset();
      throw;
    }
    allocations.left.reset();
    if (!failed) return;
    look();
  }
}

}  // namespace troupe::testing
