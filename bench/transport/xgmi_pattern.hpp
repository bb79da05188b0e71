#pragma once

/// Kernels that fill and check GPU memory, so that every byte can be checked. All run on the
/// current GPU; a driver's error ends the process.

#include <cstdint>

namespace troupe::bench {

/// Bytes `to` to `to + length` of a target must be bytes `from` on of the pattern.
struct moved_range {
  std::uint64_t from;
  std::uint64_t to;
  std::uint64_t length;
};

void use_gpu(std::uint32_t index);
/// Sets byte `i` of `memory` to byte `first + i` of pattern `seed`.
void fill_pattern(void* memory, std::uint64_t bytes, std::uint64_t first, std::uint64_t seed);
void fill_poison(void* memory, std::uint64_t bytes);
/// The number of wrong bytes in the ranges, which are poisoned again afterwards.
[[nodiscard]] std::uint64_t wrong_bytes(void* target, const moved_range* moved, std::uint64_t count,
                                        std::uint64_t seed);
/// The number of bytes that are no longer poison. `first` gets the position of the first one.
[[nodiscard]] std::uint64_t touched_bytes(const void* memory, std::uint64_t bytes,
                                          std::uint64_t* first);

}  // namespace troupe::bench
