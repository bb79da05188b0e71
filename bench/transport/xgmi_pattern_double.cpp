// The kernels' work, done by the processor on memory of GPU doubles.

#include <cstring>

#include "pattern_word.hpp"
#include "xgmi_pattern.hpp"

namespace troupe::bench {

namespace {

using u8 = unsigned char;

}  // namespace

void use_gpu(std::uint32_t /*index*/) {}

void fill_pattern(void* memory, std::uint64_t bytes, std::uint64_t first, std::uint64_t seed) {
  auto* const to = static_cast<u8*>(memory);
  for (std::uint64_t i = 0; i < bytes; ++i) to[i] = pattern(first + i, seed);
}

void fill_poison(void* memory, std::uint64_t bytes) {
  std::memset(memory, poison, bytes);
}

std::uint64_t wrong_bytes(void* target, const moved_range* moved, std::uint64_t count,
                          std::uint64_t seed) {
  auto* const bytes = static_cast<u8*>(target);
  std::uint64_t found = 0;
  for (std::uint64_t r = 0; r < count; ++r) {
    for (std::uint64_t i = 0; i < moved[r].length; ++i) {
      auto& byte = bytes[moved[r].to + i];
      found += byte != pattern(moved[r].from + i, seed) ? 1 : 0;
      byte = poison;
    }
  }
  return found;
}

std::uint64_t touched_bytes(const void* memory, std::uint64_t bytes, std::uint64_t* first) {
  const auto* const at = static_cast<const u8*>(memory);
  std::uint64_t found = 0;
  *first = ~std::uint64_t{0};
  for (std::uint64_t i = 0; i < bytes; ++i) {
    if (at[i] == poison) continue;
    if (found++ == 0) *first = i;
  }
  return found;
}

}  // namespace troupe::bench
