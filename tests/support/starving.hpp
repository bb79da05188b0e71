#pragma once

#include <cstddef>
#include <new>

#include <gtest/gtest.h>

#include "allocations.hpp"

namespace troupe::testing {

/// Lets the first, then the second allocation of `call` fail, and so on, and looks at what is left each time.
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
