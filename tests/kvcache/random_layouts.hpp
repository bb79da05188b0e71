#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "troupe/kvcache/layout.hpp"

namespace troupe::kvcache::testing {

/// Seeded numbers; a failing test prints the seed, and the seed reruns it.
class dice {
 public:
  explicit dice(std::uint64_t seed) : engine_{seed} {}
  /// From `low` to `high`, both included.
  template <class T = std::uint32_t>
  T roll(std::uint64_t low, std::uint64_t high) {
    return static_cast<T>(low + engine_() % (high - low + 1));
  }
  bool one_in(std::uint32_t n) { return roll(1, n) == 1; }

 private:
  std::mt19937_64 engine_;
};

/// What the two sides of a transfer agree on; ranks, blocks and arrangement remain open.
inline cache_shape random_model(dice& d) {
  cache_shape shape;
  const auto layers = d.roll(1, 5);
  const auto heads = d.roll(1, 8);
  const auto dim = d.roll(1, 3);
  const bool hybrid = d.one_in(3);
  const auto main_kind = d.one_in(4) ? layer_kind::mla : layer_kind::attention;
  for (std::uint32_t i = 0; i < layers; ++i) {
    const auto kind = hybrid ? static_cast<layer_kind>(d.roll(1, 3)) : main_kind;
    const auto h = hybrid ? d.roll(1, 8) : heads;
    const auto n = hybrid ? d.roll(1, 3) : dim;
    switch (kind) {
      case layer_kind::attention:
        shape.layers.push_back({kind, h, n});
        if (d.one_in(8)) shape.layers.back().value_dim = d.roll(1, 3);
        break;
      case layer_kind::mla: shape.layers.push_back({kind, 0, n * 4}); break;
      case layer_kind::recurrent:
      case layer_kind::opaque: shape.layers.push_back({layer_kind::recurrent, 0, 0}); break;
    }
  }
  const char* types[] = {"fp8", "bf16", "fp32"};
  if (d.one_in(8)) {
    auto& some = shape.layers[d.roll(0, shape.layers.size() - 1)];
    some.dtype = types[d.roll(0, 2)];
    some.element_size = dtype_size(some.dtype);
  }
  shape.dtype = types[d.roll(0, 2)];
  shape.block_tokens = d.one_in(4) ? d.roll(1, 16) : d.roll(1, 5);
  return shape;
}

inline arrangement random_arrangement(dice& d) {
  arrangement how;
  how.order = static_cast<block_order>(d.roll(0, 2));
  how.kv = static_cast<kv_placement>(d.roll(0, 1));
  how.inner = static_cast<block_inner>(d.roll(0, 1));
  if (how.order == block_order::block_interleaved) how.kv = kv_placement::together;
  if (how.order == block_order::layers_first && d.one_in(3)) how.regions = region_use::per_layer;
  return how;
}

/// An unnamed arrangement: one region per layer, [block][token][K or V][head], with gaps.
inline void make_unnamed(cache_layout& layout, dice& d) {
  std::uint32_t region = 0;
  for (auto& layer : layout.layers) {
    if (layer.planes.empty()) continue;
    const auto gap = d.roll<std::uint64_t>(0, 5);
    const auto base = d.roll<std::uint64_t>(0, 9);
    const std::uint64_t widest =
        std::max(layer.planes.front().head_bytes, layer.planes.back().head_bytes);
    const std::uint64_t head = widest + (d.one_in(2) ? gap : 0);
    const std::uint64_t row = head * layer.planes[0].heads;
    const std::uint64_t token = row * layer.planes.size() + gap;
    for (std::size_t p = 0; p < layer.planes.size(); ++p) {
      layer.planes[p] = {region,
                         layer.planes[p].heads,
                         base + p * row,
                         token * layout.block_tokens + gap,
                         token,
                         head,
                         layer.planes[p].head_bytes};
    }
    ++region;
  }
}

/// A layout of `model` for one rank, in any arrangement.
inline cache_layout random_layout(const cache_shape& model, std::uint32_t blocks,
                                  std::uint32_t rank, std::uint32_t ranks, const arrangement& how,
                                  bool unnamed, dice& d) {
  cache_shape shape = model;
  shape.blocks = blocks;
  shape.tp_rank = rank;
  shape.tp_size = ranks;
  cache_layout layout = make_layout(shape, how).value();
  if (unnamed) make_unnamed(layout, d);
  return layout;
}

}  // namespace troupe::kvcache::testing
