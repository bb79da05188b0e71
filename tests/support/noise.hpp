#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

namespace troupe::testing {

/// The random words of a seed (splitmix64; Steele, Lea and Flood 2014), drawn in pieces and copied.
/// The thread sanitizer sees only the copies, which is cheap; watching each word being drawn would
/// take it seconds.
class noise {
 public:
  explicit noise(std::uint64_t seed) : state_{seed * 0xd1b54a32d192ed03U} {}

  void fill(std::span<std::byte> memory) {
    while (!memory.empty()) {
      draw();
      const auto part = memory.first(std::min(memory.size(), sizeof drawn_));
      std::memcpy(part.data(), drawn_.data(), part.size());
      memory = memory.subspan(part.size());
    }
  }

 private:
  __attribute__((no_sanitize("thread"))) void draw() {
    auto* const end = reinterpret_cast<std::uint64_t*>(&drawn_ + 1);
    for (auto* word = reinterpret_cast<std::uint64_t*>(&drawn_); word != end; ++word) {
      auto mixed = state_ += 0x9e3779b97f4a7c15U;
      mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9U;
      mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebU;
      *word = mixed ^ (mixed >> 31);
    }
  }

  std::uint64_t state_;
  std::array<std::uint64_t, 512> drawn_;
};

inline void fill_with_noise(std::span<std::byte> memory, std::uint64_t seed) {
  noise{seed}.fill(memory);
}

inline std::vector<std::byte> noise_of(std::size_t size, std::uint64_t seed) {
  std::vector<std::byte> made(size);
  fill_with_noise(made, seed);
  return made;
}

}  // namespace troupe::testing
