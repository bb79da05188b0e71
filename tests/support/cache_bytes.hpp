#pragma once

/// Byte patterns that belong to one request and one place of a cache, for tests that move caches.
/// Layers are numbered as in the cache; their content depends on the layer's number in the model.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "troupe/actors/engine.hpp"

namespace troupe::testing {

/// The bytes of one cache, addressed as the layout says.
class cache_bytes {
 public:
  explicit cache_bytes(engine& node) : layout_{node.layout()} {
    for (std::size_t i = 0;; ++i) {
      auto region = node.region(i);
      if (!region) break;
      regions_.push_back(*region);
    }
  }

  /// Writes the pattern of request `seed` to tokens [begin, end) of layers [layer_begin,
  /// layer_end).
  void fill(const std::vector<block_id>& blocks, std::uint32_t layer_begin, std::uint32_t layer_end,
            std::uint32_t begin, std::uint32_t end, std::uint64_t seed) {
    each(blocks, layer_begin, layer_end, begin, end, seed,
         [](std::byte* at, std::span<const std::byte> value) {
           std::memcpy(at, value.data(), value.size());
         });
  }
  /// How many (layer, plane, token, head) pieces differ from the pattern of `seed`.
  [[nodiscard]] std::size_t differing(const std::vector<block_id>& blocks, std::uint32_t begin,
                                      std::uint32_t end, std::uint64_t seed) {
    return differing_layers(blocks, 0, static_cast<std::uint32_t>(layout_.layers.size()), begin,
                            end, seed);
  }
  [[nodiscard]] std::size_t differing_layers(const std::vector<block_id>& blocks,
                                             std::uint32_t layer_begin, std::uint32_t layer_end,
                                             std::uint32_t begin, std::uint32_t end,
                                             std::uint64_t seed) {
    std::size_t count = 0;
    each(blocks, layer_begin, layer_end, begin, end, seed,
         [&](std::byte* at, std::span<const std::byte> value) {
           if (std::memcmp(at, value.data(), value.size()) != 0) ++count;
         });
    return count;
  }
  void poison() {
    for (auto region : regions_) std::memset(region.data(), 0xEE, region.size());
  }

 private:
  template <class Visit>
  void each(const std::vector<block_id>& blocks, std::uint32_t layer_begin, std::uint32_t layer_end,
            std::uint32_t begin, std::uint32_t end, std::uint64_t seed, Visit visit) {
    std::vector<std::byte> value;
    for (auto layer = layer_begin; layer < layer_end; ++layer) {
      const auto& planes = layout_.layers[layer].planes;
      const auto& shape = layout_.layers[layer].shape;
      const auto first_head =
          shape.kv_heads > 0
              ? kvcache::head_range(shape.kv_heads, layout_.tp_size, layout_.tp_rank).begin
              : 0;
      for (std::size_t p = 0; p < planes.size(); ++p) {
        const auto& plane = planes[p];
        value.resize(plane.head_bytes);
        for (auto token = begin; token < end; ++token) {
          const auto block = blocks[token / layout_.block_tokens].value;
          for (std::uint32_t head = 0; head < plane.heads; ++head) {
            std::uint64_t state =
                seed * 0x9E3779B97F4A7C15ull ^ (std::uint64_t{layout_.first_layer + layer} << 48) ^
                (std::uint64_t{p} << 40) ^ (std::uint64_t{first_head + head} << 32) ^ token;
            for (auto& byte : value) {
              state = state * 6364136223846793005ull + 1442695040888963407ull;
              byte = static_cast<std::byte>(state >> 56);
            }
            visit(regions_[plane.region].data() + plane.base + block * plane.block_stride +
                      (token % layout_.block_tokens) * plane.token_stride +
                      head * plane.head_stride,
                  value);
          }
        }
      }
    }
  }

  const kvcache::cache_layout& layout_;
  std::vector<std::span<std::byte>> regions_;
};

}  // namespace troupe::testing
