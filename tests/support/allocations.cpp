#include "allocations.hpp"

#include <algorithm>
#include <cstdlib>
#include <new>
#include <utility>

namespace troupe::testing {

thread_local allocation_record allocations;

namespace {

bool is_made(std::size_t size) {
  auto& record = allocations;
  record.largest = std::max(record.largest, size);
  if (record.left && *record.left == 0) {
    if (std::exchange(record.once, false)) record.left.reset();
    return false;
  }
  if (record.left) --*record.left;
  ++record.made;
  return true;
}

}  // namespace

}  // namespace troupe::testing

// The array forms call these.

[[gnu::noinline]] void* operator new(std::size_t size) {
  if (troupe::testing::is_made(size)) {
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
