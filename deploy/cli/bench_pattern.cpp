#include "troupe/deploy/cli/bench_pattern.hpp"

#include <algorithm>
#include <cstring>
#include <string>

namespace troupe::deploy::cli {

namespace {

/// Mixes every bit of a number into all of its bits.
constexpr std::uint64_t mix(std::uint64_t x) noexcept {
  x = (x ^ (x >> 30U)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27U)) * 0x94d049bb133111ebU;
  return x ^ (x >> 31U);
}

struct place {
  std::size_t layer, plane, token, head;
};

constexpr std::uint64_t key_of(std::uint64_t request, const place& at) noexcept {
  auto key = mix(request + 1);
  key = mix(key ^ at.layer);
  key = mix(key ^ (std::uint64_t{at.plane} << 32U) ^ at.token);
  return mix(key ^ at.head);
}

constexpr std::uint64_t word_of(std::uint64_t key, std::size_t index) noexcept {
  return key + index * 0x9e3779b97f4a7c15U;
}

/// Calls `visit` with the bytes of every head of every token until it returns false.
template <class Visit>
void for_each_head(const cache_part& part, Visit visit) {
  const auto& layout = *part.layout;
  for (std::size_t l = 0; l < layout.layers.size(); ++l)
    for (std::size_t p = 0; p < layout.layers[l].planes.size(); ++p) {
      const auto& plane = layout.layers[l].planes[p];
      auto* base = part.regions[plane.region].data();
      for (std::uint32_t t = 0; t < part.tokens; ++t) {
        const auto block = part.blocks[t / layout.block_tokens];
        for (std::uint32_t h = 0; h < plane.heads; ++h) {
          auto* bytes = base + plane.offset_of(block, t % layout.block_tokens, h);
          if (!visit(place{l, p, t, h}, bytes, plane.head_bytes)) return;
        }
      }
    }
}

void fill(std::byte* to, std::size_t size, std::uint64_t key) {
  for (std::size_t at = 0; at < size; at += sizeof(std::uint64_t)) {
    const auto word = word_of(key, at / sizeof(std::uint64_t));
    std::memcpy(to + at, &word, std::min(sizeof word, size - at));
  }
}

bool matches(const std::byte* from, std::size_t size, std::uint64_t key) {
  for (std::size_t at = 0; at < size; at += sizeof(std::uint64_t)) {
    const auto word = word_of(key, at / sizeof(std::uint64_t));
    if (std::memcmp(from + at, &word, std::min(sizeof word, size - at)) != 0) return false;
  }
  return true;
}

}  // namespace

void fill_pattern(const cache_part& part, std::uint64_t request) {
  for_each_head(part, [&](const place& at, std::byte* head, std::size_t size) {
    fill(head, size, key_of(request, at));
    return true;
  });
}

result<void> verify_pattern(const cache_part& part, std::uint64_t request) {
  result<void> verdict;
  for_each_head(part, [&](const place& at, const std::byte* head, std::size_t size) {
    if (matches(head, size, key_of(request, at))) return true;
    verdict = fail(errc::internal,
                   "transfer " + std::to_string(request) + " arrived with wrong bytes at layer " +
                       std::to_string(at.layer) + ", plane " + std::to_string(at.plane) +
                       ", token " + std::to_string(at.token) + ", head " + std::to_string(at.head));
    return false;
  });
  return verdict;
}

}  // namespace troupe::deploy::cli
