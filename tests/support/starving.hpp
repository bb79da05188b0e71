#pragma once

/// Allocations that fail on purpose, on the thread that wants it. Replaces the allocator of the whole program: for one
/// source of it.

#include <cstddef>
#include <cstdlib>
#include <new>
#include <optional>
#include <utility>

#include <gtest/gtest.h>

namespace troupe::testing {

/// Of this thread: how many are made until all fail; none: all are made.
inline thread_local std::optional<std::size_t> allocations_left;

inline bool allocation_fails() {
  if (!allocations_left) return false;
  if (*allocations_left == 0) return true;
  --*allocations_left;
  return false;
}

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

[[gnu::noinline]] void* operator new(std::size_t size) {
  if (!troupe::testing::allocation_fails()) {
    if (void* memory = std::malloc(size)) return memory;
  }
  throw std::bad_alloc{};
}
[[gnu::noinline]] void operator delete(void* memory) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}
