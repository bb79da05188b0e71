// Layers with block tables of their own, over the same bytes: exactly the tokens that each table
// keeps move.

#include <algorithm>
#include <cstring>
#include <vector>

#include <gmock/gmock.h>

#include "troupe/kvcache/layout.hpp"
#include "troupe/kvcache/layout_fingerprint.hpp"
#include "troupe/kvcache/plan.hpp"

#include "fails_with.hpp"
#include "random_layouts.hpp"
#include "sanitized.hpp"

namespace troupe::kvcache {
namespace {

using testing::dice;
using ::testing::HasSubstr;
using troupe::testing::fails_with;

constexpr std::uint32_t heads = 4;
constexpr std::uint32_t groups = 3;
constexpr std::uint32_t layers_of_group = 2;
constexpr std::uint32_t block_tokens = 4;
constexpr std::byte untouched{0xee};

/// Layer i is in group i % 3. Layers 0 to 2 lie over the same bytes, 3 to 5 over the bytes behind.
/// A block of group 2 holds twice as many tokens of half the size.
cache_layout hybrid(std::uint32_t blocks, std::uint32_t rank, std::uint32_t ranks,
                    std::uint64_t gap = 0) {
  cache_layout layout;
  layout.dtype = "fp8";
  layout.element_size = 1;
  layout.block_tokens = block_tokens;
  layout.blocks = blocks;
  layout.tp_rank = rank;
  layout.tp_size = ranks;
  layout.groups.resize(groups);
  layout.groups[2].block_tokens = 2 * block_tokens;
  for (std::uint32_t i = 0; i < groups * layers_of_group; ++i) {
    const auto group = i % groups;
    layout.groups[group].layers.push_back(i);
    layer_layout layer;
    layer.shape.kv_heads = heads;
    layer.shape.head_dim = group == 2 ? 1 : 2;
    plane p;
    p.heads = head_range(heads, ranks, rank).count();
    p.head_bytes = layer.shape.head_dim;
    p.head_stride = p.head_bytes;
    p.token_stride = p.heads * p.head_stride;
    const auto plane_bytes = block_tokens * p.heads * 2;
    p.block_stride = 2 * plane_bytes + gap;
    p.base = i / groups * blocks * p.block_stride;
    layer.planes.push_back(p);
    p.base += plane_bytes;
    layer.planes.push_back(p);
    layout.layers.push_back(layer);
  }
  return layout;
}

/// The blocks of a request for each group.
struct tables {
  std::vector<std::vector<block_id>> blocks;
  std::vector<std::uint64_t> first;  ///< number of the first block
  std::vector<std::uint64_t> from;

  [[nodiscard]] std::vector<block_table> all() const {
    std::vector<block_table> out;
    for (std::size_t g = 0; g < blocks.size(); ++g) {
      out.push_back({block_list{blocks[g], first[g]}, from[g]});
    }
    return out;
  }
};

/// Blocks for the tokens from `from[g]` on, each number used once.
tables tables_for(std::uint32_t tokens, const std::vector<std::uint64_t>& from, std::uint32_t pool,
                  dice& d) {
  std::vector<block_id> all(pool);
  for (std::uint32_t i = 0; i < pool; ++i) all[i].value = i;
  for (std::uint32_t i = 0; i + 1 < pool; ++i) std::swap(all[i], all[d.roll(i, pool - 1)]);
  tables out;
  out.from = from;
  for (std::size_t g = 0; g < from.size(); ++g) {
    const std::uint64_t unit = g == 2 ? 2 * block_tokens : block_tokens;
    const auto count = blocks_in({from[g], tokens}, unit);
    out.first.push_back(from[g] / unit);
    out.blocks.emplace_back(all.end() - static_cast<std::ptrdiff_t>(count), all.end());
    all.resize(all.size() - count);
  }
  return out;
}

std::byte value_of(std::uint32_t layer, std::size_t plane, std::uint64_t token, std::uint32_t head,
                   std::uint64_t at) {
  return static_cast<std::byte>(1 + layer * 41 + plane * 131 + token * 37 + head * 17 + at * 5);
}

/// Visits each byte of each token of [begin, end) that the tables keep.
template <class Each>
void each_byte(const cache_layout& layout, const std::vector<block_table>& of, token_range tokens,
               Each&& each) {
  const auto first_head = head_range(heads, layout.tp_size, layout.tp_rank).begin;
  for (std::uint32_t layer = 0; layer < layout.layers.size(); ++layer) {
    const auto& table = of[table_of(layout, layer)];
    const auto kept = table.kept_of(tokens);
    for (std::uint32_t plane = 0; plane < 2; ++plane) {
      for (auto token = kept.begin; token < kept.end; ++token) {
        for (std::uint32_t head = 0; head < layout.layers[layer].planes[plane].heads; ++head) {
          const auto bytes =
              locate(layout, table.blocks, {layer, plane, static_cast<std::uint32_t>(token), head})
                  .value();
          for (std::uint64_t at = 0; at < bytes.length; ++at) {
            each(bytes.offset + at, value_of(layer, plane, token, first_head + head, at));
          }
        }
      }
    }
  }
}

void apply(const transfer_plan& plan, const std::vector<std::byte>& from,
           std::vector<std::byte>& to) {
  for (const auto& piece : plan.pieces) {
    for (const auto& s : piece.segments) {
      for (std::uint32_t i = 0; i < s.count; ++i) {
        std::memcpy(to.data() + s.remote_offset + i * s.remote_stride,
                    from.data() + s.local_offset + i * s.local_stride, s.length);
      }
    }
  }
}

TEST(layer_groups, of_each_what_its_destination_keeps_arrives_and_nothing_else_is_written) {
  for (std::uint64_t seed = 1; seed <= troupe::testing::tries(300U); ++seed) {
    dice d{seed};
    const std::uint32_t sources = 1U << d.roll(0, 2);
    const std::uint32_t targets = 1U << d.roll(0, 2);
    const auto tokens = d.roll(1, 40);
    const std::uint32_t pool = 30 + d.roll(0, 5);
    // The source keeps a window as well, at least as long as the destination's.
    std::vector<std::uint64_t> kept{0, d.roll<std::uint64_t>(0, tokens), 0};
    if (d.one_in(2)) kept[2] = d.roll<std::uint64_t>(0, tokens);
    auto held = kept;
    for (auto& from : held) from = d.roll<std::uint64_t>(0, from);
    const auto there_tables = tables_for(tokens, kept, pool, d);
    const auto here_tables = tables_for(tokens, held, pool, d);
    for (std::uint32_t target = 0; target < targets; ++target) {
      const auto remote = hybrid(pool, target, targets, d.roll(0, 3));
      std::vector<std::byte> there(region_sizes(remote).front(), untouched);
      std::uint64_t moved = 0;
      for (std::uint32_t source = 0; source < sources; ++source) {
        const auto local = hybrid(pool, source, sources, d.roll(0, 3));
        std::vector<std::byte> here(region_sizes(local).front());
        each_byte(local, here_tables.all(), {0, tokens},
                  [&](std::uint64_t offset, std::byte value) { here[offset] = value; });
        const auto geometry =
            transfer_geometry::create(local, remote, data_flow::to_remote).value();
        const auto reverse = transfer_geometry::create(remote, local, data_flow::to_local).value();
        for (std::uint32_t at = 0; at < tokens;) {
          const auto end = std::min(tokens, at + d.roll(1, 15));
          const auto cut = d.roll(0, groups * layers_of_group);
          for (const layer_range some :
               {layer_range{0, cut}, layer_range{cut, groups * layers_of_group}}) {
            const auto plan =
                geometry.plan(some, {at, end}, here_tables.all(), there_tables.all()).value();
            const auto granted =
                geometry.remote_map().bytes_of({at, end}, there_tables.all()).value();
            for (const auto& piece : plan.pieces) {
              for (const auto& s : piece.segments) {
                ASSERT_TRUE(granted[piece.remote_region].covers(
                    {s.remote_offset, s.length, s.remote_stride, s.count}))
                    << "seed " << seed;
              }
            }
            EXPECT_EQ(plan.bytes, geometry.bytes_of(some, {at, end}, kept));
            EXPECT_EQ(
                reverse.plan(some, {at, end}, there_tables.all(), here_tables.all()).value().bytes,
                plan.bytes);
            moved += plan.bytes;
            apply(plan, here, there);
          }
          at = end;
        }
      }
      auto expected = std::vector<std::byte>(there.size(), untouched);
      std::uint64_t wanted = 0;
      each_byte(remote, there_tables.all(), {0, tokens},
                [&](std::uint64_t offset, std::byte value) {
                  expected[offset] = value;
                  ++wanted;
                });
      ASSERT_EQ(there, expected) << "seed " << seed;
      EXPECT_EQ(moved, wanted) << "seed " << seed;
    }
  }
}

TEST(layer_groups, a_grant_is_of_what_each_keeps_and_of_no_byte_more) {
  for (std::uint64_t seed = 1; seed <= troupe::testing::tries(100U); ++seed) {
    dice d{seed};
    const auto layout = hybrid(20, 0, 1, d.roll(0, 2));
    const auto map = cache_map::create(layout).value();
    const auto tokens = d.roll(1, 24);
    const auto held = tables_for(
        tokens, {0, d.roll<std::uint64_t>(0, tokens), d.roll<std::uint64_t>(0, tokens)}, 20, d);
    const token_range some{d.roll(0, tokens - 1), tokens};
    std::vector<bool> expected(region_sizes(layout).front(), false);
    each_byte(layout, held.all(), some,
              [&](std::uint64_t offset, std::byte /*value*/) { expected[offset] = true; });
    const auto granted = map.bytes_of(some, held.all()).value();
    for (std::uint64_t at = 0; at < expected.size(); ++at) {
      ASSERT_EQ(granted.front().covers({at, 1, 0, 1}), expected[at]) << "seed " << seed;
    }
    EXPECT_TRUE(granted.front().check_within(expected.size()));
    const auto hull = granted.front().hull();
    const auto first = std::ranges::find(expected, true) - expected.begin();
    if (hull.length == 0) continue;
    EXPECT_EQ(hull.offset, static_cast<std::uint64_t>(first));
  }
}

TEST(layer_groups, no_block_is_two_groups_where_they_lie_over_the_same_bytes) {
  const auto layout = hybrid(8, 0, 1);
  EXPECT_TRUE(validate(layout, region_sizes(layout)));
  EXPECT_EQ(pools_of_tables(layout), (std::vector<std::uint32_t>{0, 0, 0}));
  const auto geometry = transfer_geometry::create(layout, layout, data_flow::to_remote).value();
  const std::vector<block_id> one{block_id{1}};
  const std::vector<block_id> two{block_id{2}};
  const std::vector<block_id> three{block_id{3}};
  const std::vector<block_table> apart{one, two, three};
  const std::vector<block_table> same{one, two, one};
  EXPECT_TRUE(geometry.plan({0, 6}, {0, 4}, same, apart)) << "one may read it twice";
  const auto twice = geometry.plan({0, 6}, {0, 4}, apart, same);
  ASSERT_THAT(twice, fails_with(errc::invalid_config, HasSubstr("block 1 is named twice")));
  EXPECT_TRUE(geometry.plan({0, 2}, {0, 4}, apart, same)) << "group 2 has no part in these layers";
}

/// The third group shares no byte with the first, but both share bytes with the second.
TEST(layer_groups, that_are_joined_by_another_one_are_of_one_pool) {
  auto layout = hybrid(8, 0, 1);
  const auto slot = layout.layers[3].planes[0].base;
  const auto put_at = [&](std::uint32_t layer, std::uint64_t number) {
    auto& planes = layout.layers[layer].planes;
    const auto apart = planes[1].base - planes[0].base;
    planes[0].base = number * slot;
    planes[1].base = planes[0].base + apart;
  };
  // Layers 0 and 3 are in the first group, 1 and 4 in the second, 2 and 5 in the third.
  put_at(1, 0);
  put_at(2, 0);
  put_at(0, 1);
  put_at(4, 1);
  put_at(3, 2);
  put_at(5, 3);
  const auto ok = validate(layout, region_sizes(layout));
  ASSERT_TRUE(ok) << ok.error().message;
  EXPECT_EQ(pools_of_tables(layout), (std::vector<std::uint32_t>{0, 0, 0}));
}

TEST(layer_groups, over_bytes_of_their_own_number_their_blocks_each_by_itself) {
  auto layout = hybrid(8, 0, 1);
  for (std::uint32_t i = 0; i < layout.layers.size(); ++i) {
    for (auto& p : layout.layers[i].planes) p.region = table_of(layout, i);
  }
  EXPECT_EQ(pools_of_tables(layout), (std::vector<std::uint32_t>{0, 1, 2}));
  const auto geometry = transfer_geometry::create(layout, layout, data_flow::to_local).value();
  const std::vector<block_id> one{block_id{1}};
  const std::vector<block_table> same{one, one, one};
  EXPECT_TRUE(geometry.plan({0, 6}, {0, 4}, same, same));
}

TEST(layer_groups, planes_of_one_group_still_share_nothing) {
  auto layout = hybrid(8, 0, 1);
  layout.layers[3].planes[0].base = layout.layers[0].planes[0].base;
  const auto ok = validate(layout, region_sizes(layout));
  ASSERT_FALSE(ok);
  EXPECT_THAT(ok.error().message, HasSubstr("layer 0 plane 0 and layer 3 plane 0 share bytes"));
}

TEST(layer_groups, share_their_bytes_block_by_block_or_not_at_all) {
  const auto refused = [](auto change) {
    auto layout = hybrid(8, 0, 1);
    change(layout.layers[1]);
    auto sizes = region_sizes(layout);
    const auto ok = validate(layout, sizes);
    ASSERT_THAT(ok, fails_with(errc::invalid_config, HasSubstr("but not block by block")));
  };
  refused([](auto& layer) {  // block 0 of one is block 1 of the other
    for (auto& p : layer.planes) p.base += p.block_stride;
  });
  refused([](auto& layer) {
    for (auto& p : layer.planes) p.block_stride *= 2;
  });
}

TEST(layer_groups, of_a_layout_that_takes_long_to_look_through_count_as_one_pool) {
  cache_layout layout = hybrid(250'000, 0, 1);
  for (std::uint32_t i = 0; i < layout.layers.size(); ++i) {
    for (std::size_t p = 0; p < 2; ++p) {
      layout.layers[i].planes[p].block_stride = (i * 2 + p + 1) * 1000;
      layout.layers[i].planes[p].base = (i * 2 + p) * 64;
    }
  }
  ASSERT_TRUE(check(layout));
  EXPECT_EQ(pools_of_tables(layout), (std::vector<std::uint32_t>{0, 0, 0}));
}

TEST(layer_groups, what_the_source_does_not_hold_is_an_error_and_no_gap) {
  const auto layout = hybrid(8, 0, 1);
  const auto geometry = transfer_geometry::create(layout, layout, data_flow::to_remote).value();
  dice d{1};
  const auto whole = tables_for(16, {0, 0, 0}, 20, d);
  const auto window = tables_for(16, {0, 8, 0}, 20, d);
  const auto ok =
      transfer_geometry::create(hybrid(20, 0, 1), hybrid(20, 0, 1), data_flow::to_remote)
          .value()
          .plan({0, 6}, {0, 16}, window.all(), whole.all());
  ASSERT_THAT(ok, fails_with(errc::out_of_range, HasSubstr("from number 2 on")));
  const std::vector<block_id> only{block_id{0}};
  const block_table one{only};
  const auto few = geometry.plan({0, 6}, {0, 4}, std::span{&one, 1}, std::span{&one, 1});
  ASSERT_FALSE(few);
  EXPECT_THAT(few.error().message, HasSubstr("the layouts have 3"));
  EXPECT_FALSE(geometry.local_map().bytes_of({0, 4}, only));
}

TEST(layer_groups, are_refused_by_name_where_they_are_none) {
  const auto refused = [](auto change, const char* word) {
    auto layout = hybrid(8, 0, 1);
    change(layout);
    const auto ok = check(layout);
    ASSERT_THAT(ok, fails_with(errc::invalid_config, HasSubstr(word))) << word;
  };
  refused([](auto& l) { l.groups[1].layers.clear(); }, "group 1 layers");
  refused([](auto& l) { l.groups[1].layers.pop_back(); }, "layer 4 group is none");
  refused([](auto& l) { l.groups[1].layers.push_back(5); }, "group 2 layer is 5");
  refused([](auto& l) { l.groups[1].layers.push_back(6); }, "group 1 layer is 6");
  refused([](auto& l) { std::ranges::reverse(l.groups[1].layers); }, "group 1 layer is 1");
  refused([](auto& l) { l.groups[0].block_tokens = max_block_tokens + 1; }, "group 0 block_tokens");
  refused([](auto& l) { l.groups.resize(max_layer_groups + 1); }, "number of groups");
  refused(
      [](auto& l) {
        l.layers.push_back({{layer_kind::recurrent, 0, 0}, {}});
        l.groups[0].layers.push_back(6);
      },
      "recurrent");
  auto with_state = hybrid(8, 0, 1);
  with_state.layers.push_back({{layer_kind::recurrent, 0, 0}, {}});
  EXPECT_TRUE(check(with_state));
}

TEST(layer_groups, are_compared_and_travel) {
  const auto layout = hybrid(8, 1, 2, 3);
  EXPECT_EQ(decode(encode(layout)).value(), layout);
  EXPECT_TRUE(check_compatible(layout, hybrid(20, 0, 1)));
  EXPECT_EQ(fingerprint_of(layout), fingerprint_of(hybrid(20, 0, 1)));
  const auto mismatch = [&](auto change, const char* word) {
    auto other = layout;
    change(other);
    const auto ok = check_compatible(layout, other);
    ASSERT_THAT(ok, fails_with(errc::layout_mismatch, HasSubstr(word))) << word;
    EXPECT_NE(fingerprint_of(layout), fingerprint_of(other)) << word;
  };
  mismatch([](auto& l) { l.groups.clear(); }, "number of groups of layers is 3 here and 0");
  mismatch([](auto& l) { l.groups[2].block_tokens = 0; }, "group 2 block_tokens is 8 here and 4");
  mismatch([](auto& l) { std::swap(l.groups[0], l.groups[1]); },
           "group 0 layer number 0 is 0 here");
  auto same = layout;
  same.groups[0].block_tokens = block_tokens;
  EXPECT_TRUE(check_compatible(layout, same));
  EXPECT_EQ(fingerprint_of(layout), fingerprint_of(same));
}

TEST(layer_groups, garbage_in_place_of_them_is_refused) {
  const auto bytes = encode(hybrid(8, 0, 1));
  for (std::size_t at = 0; at < bytes.size(); ++at) {
    for (const unsigned flip : {1U, 0x80U, 0xffU}) {
      auto wrong = bytes;
      wrong[at] ^= static_cast<std::byte>(flip);
      const auto read = decode(wrong);
      EXPECT_TRUE(!read || check(*read));
    }
    EXPECT_FALSE(decode(std::span{bytes}.first(at)));
  }
}

TEST(layer_groups, a_block_is_as_large_as_that_of_the_largest) {
  auto layout = hybrid(8, 0, 1);
  const auto block = std::uint64_t{layers_of_group} * 2 * block_tokens * heads * 2;
  EXPECT_EQ(bytes_per_block(layout), block);
  EXPECT_EQ(bytes_per_block(layout, 2), block / layers_of_group);
}

}  // namespace
}  // namespace troupe::kvcache
