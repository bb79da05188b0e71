#pragma once

/// The pattern with which GPU memory is filled and checked. Read by device compilers too.

#include <cstdint>

#if defined(__CUDACC__) || defined(__HIPCC__)
#define TROUPE_ON_GPUS_TOO __host__ __device__
#else
#define TROUPE_ON_GPUS_TOO
#endif

namespace troupe::bench {

/// The poison in memory that must not be touched.
constexpr unsigned char poison = 0xa5;

/// Eight bytes of pattern `seed`, the lowest first: each depends on its place and on the seed.
TROUPE_ON_GPUS_TOO inline std::uint64_t pattern_word(std::uint64_t word, std::uint64_t seed) {
  std::uint64_t x = word + seed * 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

TROUPE_ON_GPUS_TOO inline unsigned char pattern(std::uint64_t at, std::uint64_t seed) {
  return static_cast<unsigned char>(pattern_word(at >> 3, seed) >> ((at & 7) * 8));
}

}  // namespace troupe::bench
