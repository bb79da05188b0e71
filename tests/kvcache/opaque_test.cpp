// Layers whose bytes only the engine understands: pieces of whole blocks, which move as tokens
// become ready.

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

constexpr std::uint32_t block_tokens = 4;
constexpr std::uint32_t heads = 4;

/// A layer of attention, and a packed one: [block][head][bytes] for K and for V.
cache_layout packed(std::uint32_t blocks, std::uint32_t rank, std::uint32_t ranks,
                    opaque_unit unit = opaque_unit::block_head, std::uint64_t gap = 0) {
  cache_shape shape;
  shape.layers = attention_layers(1, heads, 2);
  shape.dtype = "fp8";
  shape.block_tokens = block_tokens;
  shape.blocks = blocks;
  shape.tp_rank = rank;
  shape.tp_size = ranks;
  auto layout = make_layout(shape, {}).value();
  layer_layout opaque;
  opaque.shape.kind = layer_kind::opaque;
  opaque.shape.unit = unit;
  opaque.shape.packing = "amx tiles";
  const bool by_head = unit == opaque_unit::block_head;
  if (by_head) opaque.shape.kv_heads = heads;
  plane p;
  p.region = 1;
  p.heads = by_head ? head_range(heads, ranks, rank).count() : 1;
  p.head_bytes = 11;
  p.head_stride = 11 + gap;
  p.block_stride = p.heads * p.head_stride;
  opaque.planes.push_back(p);
  p.base = blocks * p.block_stride;
  opaque.planes.push_back(p);
  layout.layers.push_back(opaque);
  return layout;
}

std::vector<std::vector<std::byte>> memory_of(const cache_layout& layout) {
  std::vector<std::vector<std::byte>> regions;
  for (const auto size : region_sizes(layout)) regions.emplace_back(size);
  return regions;
}

/// The value of byte `at` of piece `head` (numbered as in the model) of a request's block number
/// `number`.
std::byte value_of(std::size_t plane, std::size_t number, std::size_t head, std::size_t at) {
  return static_cast<std::byte>(1 + plane * 131 + number * 37 + head * 17 + at * 5);
}

template <class Each>
void each_byte(const cache_layout& layout, const std::vector<block_id>& blocks, Each each) {
  const auto& layer = layout.layers[1];
  const auto first = layer.shape.unit == opaque_unit::block_head
                         ? head_range(heads, layout.tp_size, layout.tp_rank).begin
                         : 0;
  for (std::size_t p = 0; p < layer.planes.size(); ++p) {
    for (std::size_t n = 0; n < blocks.size(); ++n) {
      for (std::uint32_t h = 0; h < layer.planes[p].heads; ++h) {
        for (std::uint64_t at = 0; at < layer.planes[p].head_bytes; ++at) {
          each(p, n, layer.planes[p].offset_of(blocks[n], 0, h) + at,
               value_of(p, n, first + h, at));
        }
      }
    }
  }
}

void apply(const transfer_plan& plan, const std::vector<std::vector<std::byte>>& from,
           std::vector<std::vector<std::byte>>& to) {
  for (const auto& piece : plan.pieces) {
    for (const auto& s : piece.segments) {
      for (std::uint32_t i = 0; i < s.count; ++i) {
        std::memcpy(to[piece.remote_region].data() + s.remote_offset + i * s.remote_stride,
                    from[piece.local_region].data() + s.local_offset + i * s.local_stride,
                    s.length);
      }
    }
  }
}

std::vector<block_id> shuffled(std::uint32_t count, std::uint32_t pool, dice& d) {
  std::vector<block_id> all(pool);
  for (std::uint32_t i = 0; i < pool; ++i) all[i].value = i;
  for (std::uint32_t i = 0; i + 1 < pool; ++i) std::swap(all[i], all[d.roll(i, pool - 1)]);
  all.resize(count);
  return all;
}

TEST(opaque_layers, arrive_whole_and_once_however_the_tokens_come) {
  for (std::uint64_t seed = 1; seed <= troupe::testing::tries(500U); ++seed) {
    dice d{seed};
    const bool by_head = d.one_in(2);
    const auto unit = by_head ? opaque_unit::block_head : opaque_unit::block;
    const std::uint32_t sources = by_head ? 1U << d.roll(0, 3) : 1;
    const std::uint32_t targets = by_head ? 1U << d.roll(0, 3) : 1;
    const auto tokens = d.roll(1, 30);
    const auto count = (tokens + block_tokens - 1) / block_tokens;
    const auto pool = count + d.roll(0, 4);
    const auto source_blocks = shuffled(count, pool, d);
    const auto target_blocks = shuffled(count, pool + 3, d);
    for (std::uint32_t target = 0; target < targets; ++target) {
      const auto remote = packed(pool + 3, target, targets, unit, d.roll(0, 2));
      auto there = memory_of(remote);
      std::uint64_t moved = 0;
      for (std::uint32_t source = 0; source < sources; ++source) {
        const auto local = packed(pool, source, sources, unit, d.roll(0, 2));
        auto here = memory_of(local);
        each_byte(local, source_blocks, [&](auto, auto, std::uint64_t offset, std::byte value) {
          here[1][offset] = value;
        });
        const auto geometry =
            transfer_geometry::create(local, remote, data_flow::to_remote).value();
        // As the sender rounds the tokens that are ready: to whole blocks, until the last token is.
        for (std::uint32_t at = 0; at < tokens;) {
          auto end = std::min(tokens, at + d.roll(1, 9));
          if (end < tokens) end -= end % block_tokens;
          if (end <= at) end = std::min(tokens, at + block_tokens);
          const auto plan = geometry.plan({1, 2}, {at, end}, source_blocks, target_blocks).value();
          const auto granted = geometry.remote_map().bytes_of({at, end}, target_blocks).value();
          for (const auto& piece : plan.pieces) {
            for (const auto& s : piece.segments) {
              ASSERT_TRUE(granted[piece.remote_region].covers(
                  {s.remote_offset, s.length, s.remote_stride, s.count}))
                  << "seed " << seed;
            }
          }
          EXPECT_EQ(plan.bytes, geometry.bytes_of({1, 2}, {at, end}));
          moved += plan.bytes;
          apply(plan, here, there);
          at = end;
        }
      }
      std::uint64_t held = 0;
      each_byte(remote, target_blocks,
                [&](auto plane, auto number, std::uint64_t offset, std::byte value) {
                  ++held;
                  ASSERT_EQ(there[1][offset], value)
                      << "seed " << seed << " plane " << plane << " block " << number;
                });
      EXPECT_EQ(moved, held) << "seed " << seed;
    }
  }
}

TEST(opaque_layers, say_how_many_of_their_tokens_move_together) {
  const auto layout = packed(4, 0, 1);
  const auto geometry = transfer_geometry::create(layout, layout, data_flow::to_remote).value();
  EXPECT_EQ(geometry.tokens_at_once(), (std::vector<std::uint32_t>{1, block_tokens}));
  const auto plain = make_layout({attention_layers(1, 1, 1), "fp8", 0, 4, 4}, {}).value();
  EXPECT_TRUE(transfer_geometry::create(plain, plain, data_flow::to_local)
                  .value()
                  .tokens_at_once()
                  .empty());
}

TEST(opaque_layers, a_grant_of_one_token_is_of_its_whole_block) {
  const auto map = cache_map::create(packed(4, 0, 1)).value();
  const std::vector<block_id> blocks{block_id{2}, block_id{1}};
  const auto bytes = map.bytes_of({5, 6}, blocks).value();
  const auto piece = heads * 11;
  EXPECT_TRUE(bytes[1].covers({piece * 1, piece, 0, 1}));
  EXPECT_FALSE(bytes[1].covers({piece * 2, 1, 0, 1}));
}

TEST(opaque_layers, are_refused_by_name_where_they_are_none) {
  const auto refused = [](auto change, const char* word) {
    auto layout = packed(4, 0, 1);
    change(layout);
    const auto ok = check(layout);
    ASSERT_THAT(ok, fails_with(errc::invalid_config, HasSubstr(word))) << word;
  };
  refused([](auto& l) { l.layers[1].shape.packing.clear(); }, "packing");
  refused([](auto& l) { l.layers[1].shape.packing.assign(33, 'p'); }, "packing");
  refused([](auto& l) { l.layers[0].shape.packing = "p"; }, "packing");
  refused([](auto& l) { l.layers[1].shape.unit = opaque_unit::none; }, "unit");
  refused([](auto& l) { l.layers[1].shape.unit = static_cast<opaque_unit>(3); }, "unit");
  refused([](auto& l) { l.layers[0].shape.unit = opaque_unit::block; }, "unit");
  refused([](auto& l) { l.layers[1].shape.head_dim = 8; }, "head_dim");
  refused([](auto& l) { l.layers[1].shape.kv_heads = 0; }, "kv_heads");
  refused([](auto& l) { l.layers[1].planes[0].token_stride = 1; }, "token_stride");
  refused([](auto& l) { l.layers[1].planes[0].head_bytes = 0; }, "head_bytes");
  refused([](auto& l) { l.layers[1].planes[0].head_stride = 3; }, "strides");
  refused([](auto& l) { l.layers[1].planes.clear(); }, "planes");
}

TEST(opaque_layers, move_only_between_equal_packings) {
  const auto mismatch = [](auto change, const char* word) {
    auto other = packed(4, 0, 1);
    change(other);
    const auto ok = check_compatible(packed(4, 0, 1), other);
    ASSERT_THAT(ok, fails_with(errc::layout_mismatch, HasSubstr(word))) << word;
    EXPECT_NE(fingerprint_of(packed(4, 0, 1)), fingerprint_of(other)) << word;
  };
  mismatch([](auto& l) { l.layers[1].shape.packing = "avx"; }, "'amx tiles' here and 'avx'");
  mismatch([](auto& l) { l.layers[1].planes.pop_back(); }, "planes");
  mismatch([](auto& l) { l.layers[1].planes[1].head_bytes = 10; }, "bytes of a piece");
  const auto one = packed(4, 0, 1, opaque_unit::block);
  const auto two = packed(4, 0, 2, opaque_unit::block);
  const auto ok = check_compatible(one, two);
  ASSERT_FALSE(ok);
  EXPECT_THAT(ok.error().message, HasSubstr("tensor-parallel size is 1 here and 2"));
  EXPECT_TRUE(check_compatible(packed(4, 0, 1), packed(9, 1, 2)));
}

TEST(opaque_layers, have_no_arrangement_with_a_name) {
  cache_shape shape;
  shape.layers = packed(4, 0, 1).layers.size() == 2
                     ? std::vector<layer_shape>{packed(4, 0, 1).layers[1].shape}
                     : std::vector<layer_shape>{};
  shape.blocks = 4;
  const auto made = make_layout(shape, {});
  ASSERT_FALSE(made);
  EXPECT_THAT(made.error().message, HasSubstr("opaque"));
}

// -- what layers of one model may differ in

TEST(layer_types, keys_and_values_of_other_dims_and_layers_of_other_types_travel) {
  cache_shape shape;
  shape.layers = attention_layers(2, 4, 8);
  shape.layers[0].value_dim = 6;
  shape.layers[1].dtype = "fp8";
  shape.layers[1].element_size = 1;
  shape.blocks = 5;
  shape.block_tokens = 4;
  for (const auto order :
       {block_order::layers_first, block_order::blocks_first, block_order::block_interleaved}) {
    const auto layout = make_layout(shape, {order}).value();
    EXPECT_EQ(layout.layers[0].planes[0].head_bytes, 16u);
    EXPECT_EQ(layout.layers[0].planes[1].head_bytes, 12u);
    EXPECT_EQ(layout.layers[1].planes[0].head_bytes, 8u);
    EXPECT_EQ(bytes_per_block(layout), 4u * 4 * (16 + 12 + 8 + 8));
    EXPECT_TRUE(validate(layout, region_sizes(layout)));
    EXPECT_EQ(region_sizes(layout).front(), 5 * bytes_per_block(layout));
    EXPECT_EQ(decode(encode(layout)).value(), layout);
  }
  auto other = shape;
  other.layers[0].value_dim = 0;
  const auto local = make_layout(shape, {}).value();
  auto ok = check_compatible(local, make_layout(other, {}).value());
  ASSERT_FALSE(ok);
  EXPECT_THAT(ok.error().message, HasSubstr("layer 0 value_dim is 6 here and 8"));
  other = shape;
  other.layers[1].dtype.clear();
  other.layers[1].element_size = 0;
  ok = check_compatible(local, make_layout(other, {}).value());
  ASSERT_FALSE(ok);
  EXPECT_THAT(ok.error().message, HasSubstr("layer 1 dtype is 'fp8' here and 'bf16'"));
  other = shape;
  other.layers[0].value_dim = 8;
  auto plain = shape;
  plain.layers[0].value_dim = 0;
  EXPECT_TRUE(check_compatible(make_layout(other, {}).value(), make_layout(plain, {}).value()));
}

TEST(layer_types, models_that_both_sides_name_are_compared) {
  auto local = packed(4, 0, 1);
  auto remote = local;
  local.model[0] = std::byte{0xab};
  EXPECT_TRUE(check_compatible(local, remote));
  EXPECT_EQ(decode(encode(local)).value(), local);
  remote.model[0] = std::byte{0xcd};
  const auto ok = check_compatible(local, remote);
  ASSERT_FALSE(ok);
  EXPECT_THAT(ok.error().message, HasSubstr("ab00000000000000... here and cd"));
}

TEST(layer_types, opaque_layers_travel_as_they_are) {
  for (const auto unit : {opaque_unit::block_head, opaque_unit::block}) {
    const auto layout = packed(4, 1, 2, unit, 3);
    EXPECT_EQ(decode(encode(layout)).value(), layout);
  }
}

}  // namespace
}  // namespace troupe::kvcache
