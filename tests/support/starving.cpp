#include "starving.hpp"

#include <cstdlib>

namespace troupe::testing {

thread_local std::optional<std::size_t> allocations_left;

namespace {

bool allocation_fails() {
  if (!allocations_left) return false;
  if (*allocations_left == 0) return true;
  --*allocations_left;
  return false;
}

}  // namespace

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
