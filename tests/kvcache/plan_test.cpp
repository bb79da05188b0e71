#include "troupe/kvcache/plan.hpp"

#include <numeric>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "troupe/kvcache/tp_map.hpp"

#include "block_ids.hpp"

namespace troupe::kvcache {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

struct side {
  arrangement how;
  std::uint32_t rank{0};
  std::uint32_t ranks{1};
};

constexpr std::uint32_t layer_count = 10;
constexpr std::uint32_t heads = 4;
constexpr std::uint32_t head_dim = 8;
constexpr std::uint32_t block_tokens = 16;
constexpr std::uint64_t token_bytes = heads * head_dim * 2;
constexpr std::uint64_t plane_bytes = block_tokens * token_bytes;

cache_layout make(const side& s) {
  cache_shape shape;
  shape.layers = attention_layers(layer_count, heads, head_dim);
  shape.blocks = 64;
  shape.block_tokens = block_tokens;
  shape.tp_rank = s.rank;
  shape.tp_size = s.ranks;
  return make_layout(shape, s.how).value();
}

transfer_geometry between(const side& local, const side& remote) {
  return transfer_geometry::create(make(local), make(remote), data_flow::to_remote).value();
}

std::vector<block_id> run(std::uint32_t first, std::uint32_t count) {
  std::vector<block_id> blocks;
  for (std::uint32_t i = 0; i < count; ++i) blocks.push_back(block_id{first + i});
  return blocks;
}

TEST(plan, a_run_of_whole_blocks_of_one_layer_is_one_segment) {
  const auto geometry = between({}, {});
  const auto plan = geometry.plan({3, 4}, {0, 64}, run(8, 4), run(20, 4)).value();
  ASSERT_EQ(plan.pieces.size(), 1U);
  const std::uint64_t layer = 3 * 64 * 2 * plane_bytes;
  EXPECT_THAT(plan.pieces[0].segments,
              ElementsAre(segment{layer + 8 * 2 * plane_bytes, layer + 20 * 2 * plane_bytes,
                                  4 * 2 * plane_bytes, 0, 0, 1}));
  EXPECT_EQ(plan.segments_before, 8U);
  EXPECT_EQ(plan.segments_after, 1U);
  EXPECT_EQ(plan.bytes, 4 * 2 * plane_bytes);
}

TEST(plan, scattered_blocks_of_all_layers_are_one_strided_segment_each) {
  const auto geometry = between({}, {});
  const auto plan =
      geometry.plan({0, layer_count}, {0, 48}, ids({9, 3, 40}), ids({1, 50, 7})).value();
  ASSERT_EQ(plan.pieces.size(), 1U);
  ASSERT_EQ(plan.pieces[0].segments.size(), 3U);
  for (const auto& s : plan.pieces[0].segments) {
    EXPECT_EQ(s.length, 2 * plane_bytes);
    EXPECT_EQ(s.count, layer_count);
  }
}

TEST(plan, an_interleaved_block_is_one_segment_for_all_layers) {
  const arrangement interleaved{.order = block_order::block_interleaved};
  const auto geometry = between({interleaved}, {interleaved});
  const auto plan =
      geometry.plan({0, layer_count}, {0, 48}, ids({9, 10, 40}), ids({1, 2, 7})).value();
  ASSERT_EQ(plan.segments_after, 2U);
  EXPECT_EQ(plan.pieces[0].segments[0].length, 2 * 2 * plane_bytes * layer_count);
}

TEST(plan, a_head_slice_is_strided_over_tokens_never_one_segment_per_token) {
  const auto geometry = between({{}, 0, 1}, {{}, 1, 4});
  const auto plan = geometry.plan({0, 1}, {0, 64}, run(0, 4), run(0, 4)).value();
  EXPECT_EQ(plan.segments_before, 4U * 2 * block_tokens);
  EXPECT_EQ(plan.segments_after, 1U);
  EXPECT_EQ(plan.pieces[0].segments[0].length, head_dim * 2U);
  EXPECT_EQ(plan.pieces[0].segments[0].count, 4U * 2 * block_tokens);
}

TEST(plan, a_prefix_that_ends_inside_a_block_leaves_out_its_tokens) {
  const auto geometry = between({}, {});
  const auto plan = geometry.plan({0, 1}, {21, 40}, run(0, 3), run(0, 3)).value();
  EXPECT_EQ(plan.bytes, 19 * 2 * token_bytes);
  EXPECT_EQ(plan.pieces[0].segments[0].local_offset, 2 * plane_bytes + 5 * token_bytes);
}

TEST(plan, an_empty_range_of_layers_or_tokens_is_an_empty_plan) {
  const auto geometry = between({}, {});
  EXPECT_THAT(geometry.plan({2, 2}, {0, 16}, run(0, 1), run(0, 1)).value().pieces, IsEmpty());
  EXPECT_THAT(geometry.plan({0, 2}, {7, 7}, block_list{}, block_list{}).value().pieces, IsEmpty());
  EXPECT_EQ(geometry.plan({0, 2}, {7, 7}, block_list{}, block_list{}).value().bytes, 0U);
}

TEST(plan, entries_before_the_range_may_be_anything) {
  const auto geometry = between({}, {});
  EXPECT_TRUE(geometry.plan({0, 1}, {16, 32}, ids({9999, 1}), ids({9999, 2})));
}

TEST(plan, a_region_per_layer_gives_a_piece_per_layer) {
  const arrangement apart{.regions = region_use::per_layer};
  const auto geometry = between({apart}, {});
  const auto plan = geometry.plan({2, 5}, {0, 32}, run(0, 2), run(5, 2)).value();
  ASSERT_EQ(plan.pieces.size(), 3U);
  for (std::uint32_t i = 0; i < 3; ++i) {
    EXPECT_EQ(plan.pieces[i].local_region, i + 2);
    EXPECT_EQ(plan.pieces[i].remote_region, 0U);
    EXPECT_EQ(plan.pieces[i].segments.size(), 1U);
  }
}

TEST(plan, what_is_not_there_is_out_of_range) {
  const auto geometry = between({}, {});
  const auto code = [&](layer_range layers, token_range tokens, const std::vector<block_id>& local,
                        const std::vector<block_id>& remote) {
    const auto plan = geometry.plan(layers, tokens, local, remote);
    return plan ? errc::internal : plan.error().code;
  };
  EXPECT_EQ(code({0, layer_count + 1}, {0, 16}, run(0, 1), run(0, 1)), errc::out_of_range);
  EXPECT_EQ(code({2, 1}, {0, 16}, run(0, 1), run(0, 1)), errc::out_of_range);
  EXPECT_EQ(code({0, 1}, {16, 0}, run(0, 1), run(0, 1)), errc::out_of_range);
  EXPECT_EQ(code({0, 1}, {0, 17}, run(0, 1), run(0, 2)), errc::out_of_range);
  EXPECT_EQ(code({0, 1}, {0, 17}, run(0, 2), run(0, 1)), errc::out_of_range);
  EXPECT_EQ(code({0, 1}, {0, ~0ULL}, run(0, 2), run(0, 2)), errc::out_of_range);
  EXPECT_EQ(code({0, 1}, {0, 16}, run(64, 1), run(0, 1)), errc::out_of_range);
  EXPECT_EQ(code({0, 1}, {0, 16}, run(0, 1), run(0xffff'ffffU, 1)), errc::out_of_range);
}

TEST(plan, a_destination_block_named_twice_is_refused) {
  const auto geometry = between({}, {});
  const auto twice = geometry.plan({0, 1}, {0, 48}, run(0, 3), ids({5, 6, 5}));
  ASSERT_FALSE(twice);
  EXPECT_EQ(twice.error().code, errc::invalid_config);
  EXPECT_THAT(twice.error().message, HasSubstr("5"));
  EXPECT_FALSE(geometry.plan({0, 1}, {3, 20}, run(0, 2), ids({5, 5})));
  EXPECT_TRUE(geometry.plan({0, 1}, {0, 48}, ids({5, 6, 5}), run(0, 3)));
}

TEST(plan, layouts_of_different_models_do_not_map) {
  cache_shape other;
  other.layers = attention_layers(layer_count, heads, head_dim + 1);
  other.blocks = 64;
  other.block_tokens = block_tokens;
  const auto geometry =
      transfer_geometry::create(make({}), make_layout(other, {}).value(), data_flow::to_remote);
  ASSERT_FALSE(geometry);
  EXPECT_EQ(geometry.error().code, errc::layout_mismatch);
}

// -- who sends what

TEST(sources, one_to_four_with_two_heads_all_come_from_the_one) {
  cache_shape shape;
  shape.layers = attention_layers(1, 2, 8);
  shape.blocks = 1;
  const auto layout = make_layout(shape, {}).value();
  for (std::uint32_t r = 0; r < 4; ++r) EXPECT_THAT(sources_for(layout, 1, 4, r), ElementsAre(0));
  EXPECT_THAT(targets_for(layout, 1, 4, 0), ElementsAre(0, 1, 2, 3));
}

TEST(sources, of_replicated_heads_exactly_one_rank_sends) {
  cache_shape shape;
  shape.layers = attention_layers(1, 2, 8);
  shape.blocks = 1;
  const auto layout = make_layout(shape, {}).value();
  EXPECT_THAT(sources_for(layout, 4, 1, 0), ElementsAre(0, 2));
  EXPECT_THAT(sources_for(layout, 4, 2, 1), ElementsAre(2));
  EXPECT_THAT(targets_for(layout, 4, 2, 1), IsEmpty());
  EXPECT_THAT(sources_for(layout, 8, 4, 1), ElementsAre(2));
  EXPECT_THAT(sources_for(layout, 8, 4, 2), ElementsAre(4));
}

TEST(sources, equal_sizes_pair_rank_by_rank_also_where_all_hold_the_same) {
  cache_shape shape;
  shape.layers = mla_layers(1, 8);
  shape.blocks = 1;
  const auto layout = make_layout(shape, {}).value();
  for (std::uint32_t r = 0; r < 8; ++r) EXPECT_THAT(sources_for(layout, 8, 8, r), ElementsAre(r));
  EXPECT_THAT(sources_for(layout, 2, 8, 5), ElementsAre(1));
  EXPECT_THAT(targets_for(layout, 2, 8, 1), ElementsAre(4, 5, 6, 7));
}

TEST(sources, every_head_of_every_destination_has_exactly_one_source) {
  for (std::uint32_t h = 1; h <= 9; ++h) {
    for (std::uint32_t from = 1; from <= 12; ++from) {
      for (std::uint32_t to = 1; to <= 12; ++to) {
        for (std::uint32_t d = 0; d < to; ++d) {
          std::vector<int> sent(h, 0);
          for (std::uint32_t s = 0; s < from; ++s) {
            const auto span = heads_to_send(h, {from, s, to, d});
            for (auto i = span.begin; i < span.end; ++i) ++sent[i];
          }
          const auto wanted = head_range(h, to, d);
          for (std::uint32_t i = 0; i < h; ++i) {
            ASSERT_EQ(sent[i], i >= wanted.begin && i < wanted.end ? 1 : 0)
                << h << " heads, " << from << " to " << to << ", rank " << d << ", head " << i;
          }
        }
      }
    }
  }
}

TEST(sources, the_holders_of_a_head_are_the_ranks_whose_range_has_it) {
  for (std::uint32_t h = 1; h <= 12; ++h) {
    for (std::uint32_t ranks = 1; ranks <= 20; ++ranks) {
      for (std::uint32_t head = 0; head < h; ++head) {
        const auto holders = holders_of(h, ranks, head);
        for (std::uint32_t r = 0; r < ranks; ++r) {
          const auto span = head_range(h, ranks, r);
          EXPECT_EQ(head >= span.begin && head < span.end, r >= holders.begin && r < holders.end);
        }
      }
    }
  }
}

// -- state

cache_layout with_state(std::uint32_t rank, std::uint32_t ranks) {
  cache_shape shape;
  shape.layers = {{layer_kind::recurrent, 0, 0}, {layer_kind::attention, 4, 8}};
  shape.blocks = 4;
  shape.tp_rank = rank;
  shape.tp_size = ranks;
  shape.states = {{"conv", 240 / ranks, state_sharding::sliced}, {"ssm", 1000}};
  shape.state_slots = 5;
  return make_layout(shape, {}).value();
}

TEST(state_plan, slices_and_replicas_arrive_once_at_every_rank) {
  for (const std::uint32_t from : {1U, 2U, 3U, 4U}) {
    for (const std::uint32_t to : {1U, 2U, 3U, 4U}) {
      for (std::uint32_t d = 0; d < to; ++d) {
        const auto destination = with_state(d, to);
        std::vector<int> written(region_sizes(destination)[0], 0);
        for (std::uint32_t s = 0; s < from; ++s) {
          const auto source = with_state(s, from);
          const auto geometry =
              transfer_geometry::create(source, destination, data_flow::to_remote).value();
          const auto plan = geometry.plan_state(2, 4).value();
          EXPECT_EQ(geometry.has_state(), !plan.pieces.empty());
          for (const auto& piece : plan.pieces) {
            ASSERT_TRUE(check_local(piece.segments, region_sizes(source)[0]));
            for (const auto& seg : piece.segments) {
              for (std::uint64_t i = 0; i < seg.count; ++i) {
                for (std::uint64_t b = 0; b < seg.length; ++b) {
                  ++written.at(seg.remote_offset + i * seg.remote_stride + b);
                }
              }
            }
          }
        }
        std::uint64_t total = std::accumulate(written.begin(), written.end(), std::uint64_t{0});
        EXPECT_EQ(total, bytes_per_state(destination));
        for (const auto& state : destination.states) {
          for (std::uint64_t b = 0; b < state.slot_bytes; ++b) {
            ASSERT_EQ(written[state.base + 4 * state.slot_stride + b], 1);
          }
        }
      }
    }
  }
}

TEST(state_plan, slices_come_from_where_they_are_held) {
  const auto geometry =
      transfer_geometry::create(with_state(0, 1), with_state(1, 2), data_flow::to_remote).value();
  const auto plan = geometry.plan_state(0, 0).value();
  const auto local = with_state(0, 1).states[0].base;
  const auto remote = with_state(1, 2).states[0].base;
  EXPECT_EQ(plan.pieces[0].segments[0], (segment{local + 120, remote, 120, 0, 0, 1}));
}

TEST(state_plan, a_slot_that_is_not_there_is_out_of_range) {
  const auto geometry =
      transfer_geometry::create(with_state(0, 1), with_state(0, 1), data_flow::to_remote).value();
  EXPECT_EQ(geometry.plan_state(5, 0).error().code, errc::out_of_range);
  EXPECT_EQ(geometry.plan_state(0, 5).error().code, errc::out_of_range);
}

}  // namespace
}  // namespace troupe::kvcache
