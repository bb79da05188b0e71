#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "troupe/deploy/reference_engine/generation.hpp"
#include "troupe/deploy/reference_engine/model_config.hpp"
#include "troupe/deploy/reference_engine/paged_cache.hpp"
#include "troupe/deploy/reference_engine/transformer.hpp"
#include "troupe/kvcache/layout.hpp"
#include "troupe/kvcache/plan.hpp"

/// Tiny models and caches for the tests of the reference engine.
namespace troupe::reference {

inline constexpr std::uint32_t block_tokens = 4;
inline constexpr std::uint32_t pool_blocks = 24;
inline constexpr std::uint32_t slots = 3;

inline model_config tiny_attention() {
  return attention_model(3, 2, 8, 7);
}

inline model_config tiny_latent() {
  auto config = attention_model(2, 2, 8, 8);
  config.layers = kvcache::mla_layers(3, 24);
  return config;
}

/// Attention, recurrent and latent layers, and a state that belongs to no layer.
inline model_config tiny_hybrid() {
  auto config = attention_model(2, 2, 8, 9);
  config.layers.insert(config.layers.begin() + 1, {kvcache::layer_kind::recurrent, 0, 0});
  config.layers.push_back(kvcache::mla_layers(1, 16).front());
  config.layers.push_back({kvcache::layer_kind::recurrent, 0, 0});
  config.input_channels = 24;
  return config;
}

inline std::string name_of_model(const ::testing::TestParamInfo<model_config>& param) {
  static constexpr const char* names[] = {"attention", "latent", "hybrid"};
  return names[param.index];
}

inline std::vector<token> a_prompt(std::size_t tokens, std::uint64_t seed = 1) {
  std::mt19937_64 random{seed};
  std::vector<token> prompt{begin_token};
  while (prompt.size() < tokens) prompt.push_back(static_cast<token>(random() % 256));
  return prompt;
}

/// One rank's pool, filled with a pattern that gives absurd numbers if unwritten bytes are read.
struct pool {
  std::vector<std::vector<std::byte>> bytes;
  std::shared_ptr<const cache_memory> memory;

  static pool make(kvcache::cache_layout layout) {
    pool p;
    std::vector<std::span<std::byte>> regions;
    for (const auto size : kvcache::region_sizes(layout))
      p.bytes.emplace_back(size, std::byte{0x7b});
    for (auto& region : p.bytes) regions.emplace_back(region);
    p.memory = cache_memory::create(std::move(layout), std::move(regions)).value();
    return p;
  }
};

/// A request's place in a pool: blocks in random order, and a state slot.
struct place {
  std::vector<block_id> blocks;
  std::uint32_t slot{0};

  static place scattered(std::size_t tokens, std::uint64_t seed) {
    std::vector<block_id> all(pool_blocks);
    for (std::uint32_t i = 0; i < pool_blocks; ++i) all[i] = block_id{i};
    std::mt19937_64 random{seed};
    std::shuffle(all.begin(), all.end(), random);
    all.resize((tokens + block_tokens - 1) / block_tokens);
    return {std::move(all), static_cast<std::uint32_t>(seed % slots)};
  }
};

inline kvcache::cache_layout layout_of(const model_config& model, const kvcache::arrangement& how,
                                       const std::string& dtype = "fp32", std::uint32_t rank = 0,
                                       std::uint32_t ranks = 1) {
  return kvcache::make_layout(
             cache_shape_of(model, dtype, block_tokens, pool_blocks, slots, rank, ranks), how)
      .value();
}

inline paged_cache part_of(const pool& p, const place& where) {
  return paged_cache::create(p.memory, where.blocks, where.slot).value();
}

inline model_cache cache_of(const pool& p, const place& where) {
  std::vector<paged_cache> parts{part_of(p, where)};
  return model_cache::create(std::move(parts)).value();
}

inline std::vector<kvcache::arrangement> all_arrangements() {
  using namespace kvcache;
  std::vector<arrangement> all;
  for (const auto inner : {block_inner::token_major, block_inner::head_major}) {
    for (const auto kv : {kv_placement::together, kv_placement::separate}) {
      all.push_back({block_order::layers_first, kv, inner, region_use::single});
      all.push_back({block_order::layers_first, kv, inner, region_use::per_layer});
      all.push_back({block_order::blocks_first, kv, inner, region_use::single});
    }
    all.push_back(
        {block_order::block_interleaved, kv_placement::together, inner, region_use::single});
  }
  return all;
}

inline std::string name_of(const kvcache::arrangement& how) {
  using namespace kvcache;
  std::string name = how.order == block_order::layers_first   ? "layers_first"
                     : how.order == block_order::blocks_first ? "blocks_first"
                                                              : "block_interleaved";
  name += how.kv == kv_placement::together ? "_together" : "_separate";
  name += how.inner == block_inner::token_major ? "_nhd" : "_hnd";
  if (how.regions == region_use::per_layer) name += "_per_layer";
  return name;
}

/// Carries out a plan between two pools of this process.
inline void copy(const kvcache::transfer_plan& plan, const pool& from, const pool& to) {
  for (const auto& piece : plan.pieces)
    for (const auto& s : piece.segments)
      for (std::uint32_t i = 0; i < s.count; ++i)
        std::memcpy(
            to.memory->region(piece.remote_region).data() + s.remote_offset + i * s.remote_stride,
            from.memory->region(piece.local_region).data() + s.local_offset + i * s.local_stride,
            s.length);
}

/// Moves all that one source rank has for one destination rank: layers one by one, then the state.
inline void move(const pool& from, const place& source, const pool& to, const place& destination,
                 kvcache::token_range tokens, bool state = true) {
  const auto geometry =
      kvcache::transfer_geometry::create(from.memory->layout(), to.memory->layout(),
                                         kvcache::data_flow::to_remote)
          .value();
  for (std::uint32_t layer = 0; layer < geometry.layers(); ++layer)
    copy(geometry.plan({layer, layer + 1}, tokens, source.blocks, destination.blocks).value(), from,
         to);
  if (state && geometry.has_state())
    copy(geometry.plan_state(source.slot, destination.slot).value(), from, to);
}

}  // namespace troupe::reference
