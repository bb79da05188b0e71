#include "troupe/kvcache/cache_map.hpp"

#include <algorithm>
#include <numeric>
#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "block_ids.hpp"
#include "fails_with.hpp"
#include "random_layouts.hpp"

namespace troupe::kvcache {
namespace {

using ::testing::HasSubstr;
using troupe::testing::fails_with;

constexpr std::uint32_t layer_count = 4;
constexpr std::uint64_t plane_bytes = 16ULL * 2 * 8 * 2;  // tokens, heads, elements, bytes of each

cache_layout make(const arrangement& how, std::uint32_t blocks = 64) {
  cache_shape shape;
  shape.layers = attention_layers(layer_count, 2, 8);
  shape.blocks = blocks;
  return make_layout(shape, how).value();
}

TEST(cache_map, holds_the_blocks_of_the_tokens_in_every_layer_and_no_other) {
  const auto layout = make({});
  const auto bytes = cache_map::create(layout).value().bytes_of({0, 48}, ids({9, 3, 40})).value();
  ASSERT_EQ(bytes.size(), 1U);
  const auto block = 2 * plane_bytes;
  for (std::uint32_t layer = 0; layer < layer_count; ++layer) {
    for (std::uint32_t b = 0; b < 64; ++b) {
      const bool named = b == 9 || b == 3 || b == 40;
      EXPECT_EQ(bytes[0].covers({(layer * 64ULL + b) * block, block, 0, 1}), named);
    }
  }
  EXPECT_TRUE(bytes[0].covers({3 * block, block, 64 * block, layer_count}));
}

TEST(cache_map, a_prefix_that_others_share_is_not_in_it_whatever_the_edges) {
  const auto map = cache_map::create(make({block_order::blocks_first})).value();
  const auto blocks = ids({5, 6, 7});
  const auto block = 2 * plane_bytes * layer_count;
  const auto row = plane_bytes / 16;  // one token of one plane
  const auto bytes = map.bytes_of({20, 40}, {std::span{blocks}.subspan(1), 1}).value();
  EXPECT_FALSE(bytes[0].covers({5 * block, 1, 0, 1}));
  EXPECT_FALSE(bytes[0].covers({6 * block + 3 * row, row, 0, 1})) << "token 19";
  EXPECT_TRUE(bytes[0].covers({6 * block + 4 * row, 12 * row, plane_bytes, 2 * layer_count}));
  EXPECT_TRUE(bytes[0].covers({7 * block, 8 * row, plane_bytes, 2 * layer_count}));
  EXPECT_FALSE(bytes[0].covers({7 * block + 8 * row, 1, 0, 1})) << "token 40";
  const auto within = map.bytes_of({18, 19}, blocks).value();
  EXPECT_EQ(within[0].hull().length, (2 * layer_count - 1) * plane_bytes + row);
}

TEST(cache_map, a_token_whose_layers_lie_together_is_one_piece_also_in_part_of_a_block) {
  // [block][token][layer][K or V][head]
  auto layout = make({});
  const std::uint64_t row = 2ULL * 8 * 2;
  const std::uint64_t token = 2 * layer_count * row;
  for (std::uint32_t layer = 0; layer < layer_count; ++layer) {
    for (std::uint32_t kv = 0; kv < 2; ++kv) {
      auto& p = layout.layers[layer].planes[kv];
      p.base = (2 * layer + kv) * row;
      p.token_stride = token;
      p.block_stride = 16 * token;
    }
  }
  const auto map = cache_map::create(layout).value();
  const auto bytes = map.bytes_of({3, 45}, ids({9, 3, 40})).value();
  EXPECT_EQ(bytes[0].extents(), (std::vector<extent>{{(9 * 16 + 3) * token, 13 * token, 0, 1},
                                                     {40 * 16 * token, 13 * token, 0, 1}}));
  EXPECT_TRUE(bytes[0].covers({3 * 16 * token, 16 * token, 0, 1}));
}

TEST(cache_map, blocks_in_one_piece_are_one_range) {
  const auto map = cache_map::create(make({block_order::block_interleaved})).value();
  const auto block = 2 * plane_bytes * layer_count;
  const auto bytes = map.bytes_of({0, 48}, ids({5, 7, 6})).value();
  ASSERT_NE(bytes[0].whole(), nullptr);
  EXPECT_EQ(*bytes[0].whole(), (extent{5 * block, 3 * block, 0, 1}));
}

TEST(cache_map, has_an_entry_for_each_region) {
  const auto layout = make({.regions = region_use::per_layer});
  const auto bytes = cache_map::create(layout).value().bytes_of({0, 16}, ids({2})).value();
  ASSERT_EQ(bytes.size(), layer_count);
  for (const auto& region : bytes)
    EXPECT_EQ(region.hull(), (extent{4 * plane_bytes, 2 * plane_bytes, 0, 1}));
}

TEST(cache_map, a_state_slot_is_in_it_when_asked_for) {
  cache_shape shape;
  shape.layers = attention_layers(1, 2, 8);
  shape.blocks = 4;
  shape.states = {{"conv", 120, state_sharding::replicated}};
  shape.state_slots = 5;
  const auto layout = make_layout(shape, {}).value();
  const auto map = cache_map::create(layout).value();
  EXPECT_EQ(map.bytes_of({0, 0}, block_list{}).value().at(0).hull().length, 0U);
  const auto slot = map.bytes_of({0, 0}, block_list{}, 3).value().at(0).hull();
  EXPECT_EQ(slot.offset, layout.states[0].base + 3 * layout.states[0].slot_stride);
  EXPECT_EQ(slot.length, 120U);
  EXPECT_EQ(map.bytes_of({0, 0}, block_list{}, 5).error().code, errc::out_of_range);
}

TEST(cache_map, what_is_not_there_is_out_of_range) {
  const auto map = cache_map::create(make({})).value();
  const auto refused = [&](token_range tokens, const block_list& blocks) {
    const auto bytes = map.bytes_of(tokens, blocks);
    return bytes ? std::string{} : bytes.error().message;
  };
  const auto two = ids({1, 2});
  EXPECT_THAT(refused({0, 16}, ids({64})), HasSubstr("block 64"));
  EXPECT_THAT(refused({0, 33}, two), HasSubstr("blocks 0 to 2"));
  EXPECT_THAT(refused({15, 20}, {two, 1}), HasSubstr("from number 1 on"));
  EXPECT_THAT(refused({2, 1}, two), HasSubstr("end before they begin"));
}

TEST(cache_map, a_layout_that_interleaves_too_many_strides_is_no_cache) {
  cache_shape shape;
  shape.layers = attention_layers(600, 1, 8);
  shape.blocks = 64;
  auto layout = make_layout(shape, {block_order::blocks_first}).value();
  for (std::uint32_t layer = 0; layer < 600; ++layer) {
    for (auto& p : layout.layers[layer].planes) p.block_stride += layer % 2;
  }
  const auto map = cache_map::create(layout);
  ASSERT_THAT(map, fails_with(errc::invalid_config, HasSubstr("one block stride")));
}

TEST(cache_map, a_layout_in_too_many_pieces_is_no_cache) {
  auto layout = make({});
  for (auto& layer : layout.layers) {
    // A gap behind each element, with the largest number of heads.
    layer.shape.kv_heads = 65'536;
    for (auto& p : layer.planes) {
      p.heads = 65'536;
      p.head_stride = p.head_bytes + 1;
      p.token_stride = p.heads * p.head_stride;
      p.block_stride = layout.block_tokens * p.token_stride;
    }
  }
  const auto map = cache_map::create(layout);
  ASSERT_THAT(map, fails_with(errc::invalid_config, HasSubstr("pieces")));
}

}  // namespace
}  // namespace troupe::kvcache
