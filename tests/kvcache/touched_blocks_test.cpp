#include "troupe/kvcache/touched_blocks.hpp"

#include <random>
#include <set>

#include <gmock/gmock.h>

#include "random_layouts.hpp"

namespace troupe::kvcache {
namespace {

/// Looks at every byte.
std::vector<block_id> looked_up(const cache_layout& layout, const region_bytes& bytes) {
  std::set<std::uint32_t> found;
  if (bytes.length == 0) return {};
  for (std::uint32_t i = 0; i < layout.layers.size(); ++i) {
    const auto tokens = block_tokens_of(layout, table_of(layout, i));
    for (const auto& p : layout.layers[i].planes) {
      if (p.region != bytes.region) continue;
      for (std::uint32_t b = 0; b < layout.blocks; ++b)
        for (std::uint32_t t = 0; t < tokens; ++t)
          for (std::uint32_t h = 0; h < p.heads; ++h) {
            const auto at = p.offset_of(block_id{b}, t, h);
            if (at < bytes.offset + bytes.length && at + p.head_bytes > bytes.offset)
              found.insert(b);
          }
    }
  }
  std::vector<block_id> blocks;
  for (const auto b : found) blocks.push_back(block_id{b});
  return blocks;
}

TEST(touched_blocks, are_those_that_a_byte_of_lies_in_the_span) {
  std::mt19937 random{7};
  const auto roll = [&](std::uint64_t most) { return random() % (most + 1); };
  for (const auto order :
       {block_order::layers_first, block_order::blocks_first, block_order::block_interleaved}) {
    for (const auto kv : {kv_placement::together, kv_placement::separate}) {
      for (const auto inner : {block_inner::token_major, block_inner::head_major}) {
        if (order == block_order::block_interleaved && kv == kv_placement::separate) continue;
        for (const auto use : {region_use::single, region_use::per_layer}) {
          if (use == region_use::per_layer && order != block_order::layers_first) continue;
          for (const bool latent : {false, true}) {
            cache_shape shape;
            shape.layers = latent ? mla_layers(3, 8) : attention_layers(3, 2, 4);
            shape.blocks = 5;
            shape.block_tokens = 4;
            const auto layout = make_layout(shape, {order, kv, inner, use});
            if (!layout) continue;
            const auto sizes = region_sizes(*layout);
            for (int i = 0; i < 60; ++i) {
              const auto region = static_cast<std::uint32_t>(roll(sizes.size() - 1));
              const auto offset = roll(sizes[region] - 1);
              const region_bytes bytes{region, offset, roll(sizes[region] - offset)};
              EXPECT_EQ(touched_blocks(*layout, bytes), looked_up(*layout, bytes))
                  << "order " << static_cast<int>(order) << " bytes " << bytes.offset << "+"
                  << bytes.length;
            }
          }
        }
      }
    }
  }
}

TEST(touched_blocks, are_none_of_what_is_a_state_or_beyond_the_cache) {
  cache_shape shape;
  shape.layers = attention_layers(2, 2, 4);
  shape.blocks = 3;
  shape.states = {{"s", 100, state_sharding::replicated}};
  shape.state_slots = 2;
  const auto layout = make_layout(shape, {}).value();
  const auto& state = layout.states.front();
  EXPECT_THAT(touched_blocks(layout, {state.region, state.base, 200}), ::testing::IsEmpty());
  EXPECT_THAT(touched_blocks(layout, {0, region_sizes(layout)[0], 1000}), ::testing::IsEmpty());
  EXPECT_THAT(touched_blocks(layout, {99, 0, 1000}), ::testing::IsEmpty());
}

}  // namespace
}  // namespace troupe::kvcache
