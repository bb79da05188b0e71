#pragma once

/// What a benchmark of GPU memory fills and checks it with: kernels, so that every byte can be looked
/// at. All on the GPU that was made current; a driver's error ends the process.

#include <cstdint>

namespace troupe::bench {

/// Bytes `to` to `to + length` of a target must be bytes `from` on of the pattern.
struct moved_range {
  std::uint64_t from;
  std::uint64_t to;
  std::uint64_t length;
};

void use_gpu(std::uint32_t index);
/// Byte `i` of `memory` becomes byte `first + i` of pattern `seed`.
void fill_pattern(void* memory, std::uint64_t bytes, std::uint64_t first, std::uint64_t seed);
void fill_poison(void* memory, std::uint64_t bytes);
/// How many bytes of the ranges are wrong. Afterwards they are poisoned again.
[[nodiscard]] std::uint64_t wrong_bytes(void* target, const moved_range* moved, std::uint64_t count,
                                        std::uint64_t seed);
/// How many bytes are not poison any more. Where the first of them is goes to `first`.
[[nodiscard]] std::uint64_t touched_bytes(const void* memory, std::uint64_t bytes,
                                          std::uint64_t* first);

}  // namespace troupe::bench
