#include "troupe/kvcache/layout.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "fails_with.hpp"
#include "random_layouts.hpp"
#include "sanitized.hpp"

namespace troupe::kvcache {
namespace {

using testing::dice;
using ::testing::HasSubstr;
using troupe::testing::fails_with;

cache_shape model(std::uint32_t layers = 2, std::uint32_t heads = 4) {
  cache_shape shape;
  shape.layers = attention_layers(layers, heads, 8);
  shape.blocks = 10;
  shape.block_tokens = 4;
  return shape;
}

cache_layout packed() {
  return make_layout(model(), {}).value();
}

TEST(head_range, replicates_heads_when_ranks_outnumber_them) {
  const std::uint32_t expected[] = {0, 0, 1, 1};
  for (std::uint32_t r = 0; r < 4; ++r) {
    EXPECT_EQ(head_range(2, 4, r), (head_span{expected[r], expected[r] + 1}));
  }
}

TEST(head_range, gives_every_head_to_exactly_one_rank_when_heads_suffice) {
  for (std::uint32_t heads = 1; heads <= 16; ++heads) {
    for (std::uint32_t ranks = 1; ranks <= heads; ++ranks) {
      std::uint32_t next = 0;
      for (std::uint32_t r = 0; r < ranks; ++r) {
        const auto held = head_range(heads, ranks, r);
        EXPECT_EQ(held.begin, next);
        EXPECT_GT(held.count(), 0U);
        next = held.end;
      }
      EXPECT_EQ(next, heads);
    }
  }
}

TEST(head_range, of_a_rank_that_is_not_there_is_empty) {
  EXPECT_EQ(head_range(4, 2, 2).count(), 0U);
  EXPECT_EQ(head_range(0, 2, 0).count(), 0U);
}

TEST(layout, the_bytes_of_a_block_are_those_of_the_heads_that_the_rank_holds) {
  cache_shape shape = model(3, 4);
  EXPECT_EQ(bytes_per_block(make_layout(shape, {}).value()), 3U * 2 * 4 * 4 * 8 * 2);
  shape.tp_size = 8;
  shape.tp_rank = 5;
  const auto sliced = make_layout(shape, {}).value();
  EXPECT_EQ(bytes_per_block(sliced), 3U * 2 * 4 * 1 * 8 * 2);
  EXPECT_EQ(bytes_per_block(sliced, 1), 2U * 4 * 1 * 8 * 2);
  shape.layers = mla_layers(2, 576);
  EXPECT_EQ(bytes_per_block(make_layout(shape, {}).value()), 2U * 4 * 576 * 2);
  shape.dtype = "fp8";
  EXPECT_EQ(bytes_per_block(make_layout(shape, {}).value()), 2U * 4 * 576);
}

TEST(layout, every_named_arrangement_fills_its_regions_exactly) {
  for (std::uint64_t seed = 1; seed <= troupe::testing::tries(2000U); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    dice d{seed};
    const auto shape = testing::random_model(d);
    const auto ranks = d.roll(1, 8);
    const auto layout = testing::random_layout(shape, d.roll(1, 9), d.roll(0, ranks - 1), ranks,
                                               testing::random_arrangement(d), false, d);
    const auto sizes = region_sizes(layout);
    const auto ok = validate(layout, sizes);
    ASSERT_TRUE(ok) << ok.error().message;
    std::uint64_t total = 0;
    for (const auto size : sizes) total += size;
    ASSERT_EQ(total, bytes_per_block(layout) * layout.blocks);
    for (std::size_t r = 0; r < sizes.size(); ++r) {
      auto smaller = sizes;
      --smaller[r];
      ASSERT_FALSE(validate(layout, smaller));
    }
  }
}

TEST(layout, a_block_is_one_piece_when_blocks_are_interleaved) {
  const auto layout = make_layout(model(), {.order = block_order::block_interleaved}).value();
  const auto block = bytes_per_block(layout);
  for (const auto& layer : layout.layers) {
    for (const auto& p : layer.planes) {
      EXPECT_EQ(p.block_stride, block);
      EXPECT_LT(p.base, block);
    }
  }
}

TEST(layout, states_stand_behind_the_planes_or_in_a_region_of_their_own) {
  cache_shape shape = model();
  shape.states = {{"conv", 100, state_sharding::sliced}, {"ssm", 4096}};
  shape.state_slots = 3;
  const auto single = make_layout(shape, {}).value();
  EXPECT_EQ(bytes_per_state(single), 4196U);
  EXPECT_EQ(region_sizes(single).size(), 1U);
  EXPECT_TRUE(validate(single, region_sizes(single)));
  const auto apart = make_layout(shape, {.regions = region_use::per_layer}).value();
  EXPECT_EQ(region_sizes(apart).size(), 3U);
  EXPECT_EQ(apart.states[1].region, 2U);
  EXPECT_TRUE(validate(apart, region_sizes(apart)));
}

TEST(layout, contradictory_arrangements_are_refused) {
  EXPECT_EQ(
      make_layout(model(), {.order = block_order::block_interleaved, .kv = kv_placement::separate})
          .error()
          .code,
      errc::invalid_config);
  EXPECT_FALSE(
      make_layout(model(), {.order = block_order::blocks_first, .regions = region_use::per_layer}));
}

TEST(layout, numbers_out_of_their_limits_are_refused_by_name) {
  const auto refused = [](auto change, const char* name) {
    cache_layout layout = packed();
    change(layout);
    const auto ok = check(layout);
    ASSERT_THAT(ok, fails_with(errc::invalid_config, HasSubstr(name))) << name;
  };
  refused([](auto& l) { l.dtype.clear(); }, "dtype");
  refused([](auto& l) { l.element_size = 0; }, "element size");
  refused([](auto& l) { l.element_size = 4; }, "element size");
  refused([](auto& l) { l.block_tokens = 0; }, "block_tokens");
  refused([](auto& l) { l.block_tokens = 1025; }, "block_tokens");
  refused([](auto& l) { l.blocks = 0; }, "blocks");
  refused([](auto& l) { l.tp_size = 0; }, "tp_size");
  refused([](auto& l) { l.tp_rank = 1; }, "tp_rank");
  refused([](auto& l) { l.layers.clear(); }, "number of layers");
  refused([](auto& l) { l.layers[1].shape.kv_heads = 0; }, "layer 1 kv_heads");
  refused([](auto& l) { l.layers[1].shape.kind = static_cast<layer_kind>(9); }, "layer 1 kind");
  refused([](auto& l) { l.layers[0].planes.pop_back(); }, "layer 0 planes");
  refused([](auto& l) { l.layers[0].planes[1].heads = 3; }, "layer 0 plane 1 heads");
  refused([](auto& l) { l.layers[0].planes[1].head_bytes = 3; }, "head_bytes");
  refused([](auto& l) { l.layers[0].planes[0].token_stride = 1; }, "strides");
  refused([](auto& l) { l.layers[0].planes[0].block_stride = ~0ULL; }, "end");
  refused([](auto& l) { l.layers[0].planes[0].base = ~0ULL; }, "end");
  refused([](auto& l) { l.layers[0].planes[0].region = 5000; }, "region");
  refused([](auto& l) { l.states.push_back({"", state_sharding::sliced, 0, 1, 0, 8, 8}); }, "name");
  refused([](auto& l) { l.states.push_back({"s", state_sharding{7}, 0, 1, 0, 8, 8}); }, "sharding");
  refused(
      [](auto& l) {
        l.states.push_back({"s", state_sharding::sliced, 0, 2, 0, 7, 8});
      },
      "slot_stride");
}

TEST(layout, shapes_too_large_for_any_memory_are_refused) {
  cache_shape shape = model();
  shape.blocks = 0xffff'ffffU;
  shape.layers = attention_layers(2048, 65'536, 65'536);
  EXPECT_FALSE(make_layout(shape, {}));
  shape = model();
  shape.states = {{"huge", ~0ULL}};
  shape.state_slots = 2;
  EXPECT_FALSE(make_layout(shape, {}));
}

TEST(validate, a_plane_that_leaves_its_region_is_out_of_range) {
  const auto layout = packed();
  auto sizes = region_sizes(layout);
  --sizes[0];
  const auto ok = validate(layout, sizes);
  ASSERT_THAT(ok, fails_with(errc::out_of_range, HasSubstr("layer 1 plane 1")));
  EXPECT_EQ(validate(layout, {}).error().code, errc::out_of_range);
}

TEST(validate, planes_that_share_a_byte_are_refused_and_named) {
  cache_layout layout = packed();
  layout.layers[1].planes[0].base -= 1;
  const auto ok = validate(layout, region_sizes(layout));
  ASSERT_THAT(ok, fails_with(errc::invalid_config, HasSubstr("layer 1 plane 0")));
}

TEST(validate, the_largest_interleaved_layout_is_judged_without_walking_its_blocks) {
  cache_shape shape = model(512, 8);
  shape.blocks = 1'000'000;
  const auto layout = make_layout(shape, {.order = block_order::block_interleaved}).value();
  EXPECT_TRUE(validate(layout, region_sizes(layout)));
}

TEST(validate, agrees_with_marking_bytes) {
  int disjoint = 0;
  int shared = 0;
  for (std::uint64_t seed = 1; seed <= troupe::testing::tries(20'000U); ++seed) {
    dice d{seed};
    cache_layout layout;
    layout.dtype = "int8";
    layout.element_size = 1;
    layout.block_tokens = d.roll(1, 3);
    layout.blocks = d.roll(1, 4);
    const auto heads = d.roll(1, 2);
    const auto dim = d.roll(1, 3);
    const std::uint64_t strides[] = {d.roll<std::uint64_t>(1, 6), d.roll<std::uint64_t>(1, 16),
                                     d.roll<std::uint64_t>(1, 60)};
    layout.layers.push_back({{layer_kind::attention, heads, dim}, {}});
    for (int p = 0; p < 2; ++p) {
      plane at{0, heads, d.roll<std::uint64_t>(0, 40), strides[2], strides[1], strides[0], dim};
      if (d.one_in(2)) at.block_stride = d.roll<std::uint64_t>(1, 60);
      if (d.one_in(3)) at.token_stride = d.roll<std::uint64_t>(1, 20);
      if (d.one_in(4)) std::swap(at.token_stride, at.head_stride);
      layout.layers[0].planes.push_back(at);
    }
    if (!check(layout)) continue;
    std::vector<int> marks(region_sizes(layout)[0]);
    int most = 0;
    for (const auto& p : layout.layers[0].planes) {
      for (std::uint64_t b = 0; b < layout.blocks; ++b) {
        for (std::uint64_t t = 0; t < layout.block_tokens; ++t) {
          for (std::uint64_t h = 0; h < heads; ++h) {
            for (std::uint64_t i = 0; i < dim; ++i) {
              const auto at = p.base + b * p.block_stride + t * p.token_stride + h * p.head_stride;
              most = std::max(most, ++marks[at + i]);
            }
          }
        }
      }
    }
    ++(most == 1 ? disjoint : shared);
    ASSERT_EQ(validate(layout, region_sizes(layout)).has_value(), most == 1) << "seed " << seed;
  }
  EXPECT_GT(disjoint, troupe::testing::tries(500));
  EXPECT_GT(shared, troupe::testing::tries(500));
}

TEST(check_compatible, physical_differences_do_not_matter) {
  cache_shape other = model();
  other.blocks = 99;
  other.tp_size = 4;
  other.tp_rank = 3;
  const auto remote = make_layout(other, {block_order::blocks_first, kv_placement::separate,
                                          block_inner::head_major, region_use::single})
                          .value();
  EXPECT_TRUE(check_compatible(packed(), remote));
}

TEST(check_compatible, a_mismatch_names_the_field_and_both_values) {
  const auto mismatch = [](auto change, std::initializer_list<const char*> words) {
    cache_shape shape = model();
    change(shape);
    const auto ok = check_compatible(packed(), make_layout(shape, {}).value());
    ASSERT_FALSE(ok);
    EXPECT_EQ(ok.error().code, errc::layout_mismatch);
    for (const auto* word : words) EXPECT_THAT(ok.error().message, HasSubstr(word));
  };
  mismatch([](auto& s) { s.dtype = "fp16"; }, {"dtype", "'bf16'", "'fp16'"});
  mismatch([](auto& s) { s.block_tokens = 16; }, {"block_tokens", "4", "16"});
  mismatch([](auto& s) { s.layers = attention_layers(3, 4, 8); }, {"layers", "2", "3"});
  mismatch([](auto& s) { s.layers[1].kv_heads = 5; }, {"layer 1 kv_heads", "4", "5"});
  mismatch([](auto& s) { s.layers[1].head_dim = 9; }, {"layer 1 head_dim", "8", "9"});
  mismatch(
      [](auto& s) {
        s.layers[1] = {layer_kind::mla, 0, 8};
      },
      {"layer 1 kind", "attention", "mla"});
  mismatch(
      [](auto& s) {
        s.states = {{"ssm", 64}};
        s.state_slots = 1;
      },
      {"states", "0", "1"});
}

TEST(check_compatible, states_must_agree_in_their_bytes_over_all_ranks) {
  cache_shape shape = model();
  shape.state_slots = 2;
  shape.states = {{"ssm", 64, state_sharding::sliced}};
  const auto one_rank = make_layout(shape, {}).value();
  shape.tp_size = 2;
  shape.states[0].bytes = 32;
  EXPECT_TRUE(check_compatible(one_rank, make_layout(shape, {}).value()));
  shape.states[0].bytes = 64;
  const auto ok = check_compatible(one_rank, make_layout(shape, {}).value());
  ASSERT_FALSE(ok);
  EXPECT_THAT(ok.error().message, HasSubstr("64"));
  EXPECT_THAT(ok.error().message, HasSubstr("128"));
}

cache_layout any_layout(dice& d) {
  cache_shape shape = testing::random_model(d);
  for (auto n = d.roll(0, 2); n > 0; --n) {
    shape.states.push_back({"state" + std::to_string(n), d.roll<std::uint64_t>(1, 1U << 20U),
                            static_cast<state_sharding>(d.roll(1, 2))});
  }
  shape.state_slots = d.roll(1, 100);
  const auto ranks = d.roll(1, 8);
  return testing::random_layout(shape, d.roll(1, 100'000), d.roll(0, ranks - 1), ranks,
                                testing::random_arrangement(d), d.one_in(3), d);
}

TEST(encode, what_is_decoded_is_what_was_encoded) {
  for (std::uint64_t seed = 1; seed <= troupe::testing::tries(3000U); ++seed) {
    dice d{seed};
    const auto layout = any_layout(d);
    const auto back = decode(encode(layout));
    ASSERT_TRUE(back) << back.error().message;
    ASSERT_EQ(*back, layout) << "seed " << seed;
  }
}

TEST(encode, a_regular_layout_takes_few_bytes) {
  cache_shape shape = model(80, 8);
  shape.blocks = 50'000;
  EXPECT_LT(encode(make_layout(shape, {}).value()).size(), 1500U);
  EXPECT_LT(encode(make_layout(shape, {.regions = region_use::per_layer}).value()).size(), 600U);
}

TEST(decode, every_truncation_is_refused) {
  dice d{7};
  for (int i = 0; i < 20; ++i) {
    const auto bytes = encode(any_layout(d));
    for (std::size_t n = 0; n < bytes.size(); ++n) {
      ASSERT_FALSE(decode(std::span{bytes}.first(n)));
    }
    auto longer = bytes;
    longer.push_back(std::byte{0});
    ASSERT_FALSE(decode(longer));
  }
}

TEST(decode, changed_bytes_are_refused_or_give_a_layout_that_passes_the_check) {
  int accepted = 0;
  for (std::uint64_t seed = 1; seed <= troupe::testing::tries(30'000U); ++seed) {
    dice d{seed};
    auto bytes = encode(any_layout(d));
    for (auto n = d.roll(1, 4); n > 0; --n) {
      bytes[d.roll<std::size_t>(0, bytes.size() - 1)] = static_cast<std::byte>(d.roll(0, 255));
    }
    const auto back = decode(bytes);
    if (!back) continue;
    ++accepted;
    ASSERT_TRUE(check(*back));
    ASSERT_EQ(decode(encode(*back)).value(), *back);
  }
  EXPECT_GT(accepted, troupe::testing::tries(100));
}

TEST(decode, random_bytes_and_huge_counts_are_refused_without_a_large_allocation) {
  dice d{1};
  for (int i = 0; i < 20'000; ++i) {
    std::vector<std::byte> bytes(d.roll<std::size_t>(0, 64));
    for (auto& b : bytes) b = static_cast<std::byte>(d.roll(0, 255));
    ASSERT_FALSE(decode(bytes));
  }
  // A dtype of 2^63 bytes, then 2^63 layers.
  std::vector<std::byte> huge;
  for (const char c : std::string{"TKVL\x02"}) huge.push_back(static_cast<std::byte>(c));
  auto many = huge;
  for (int i = 0; i < 9; ++i) huge.push_back(std::byte{0xff});
  huge.push_back(std::byte{0x01});
  EXPECT_FALSE(decode(huge));
  for (const char c :
       std::string{"\x04", 1} + "int8" + std::string{"\x01\x01\x01\x00\x01\x00\x00\x00\x00", 9}) {
    many.push_back(static_cast<std::byte>(c));
  }
  for (int i = 0; i < 8; ++i) many.push_back(std::byte{0xff});
  many.push_back(std::byte{0x7f});
  EXPECT_FALSE(decode(many));
}

TEST(decode, another_version_is_named) {
  auto bytes = encode(packed());
  bytes[4] = std::byte{3};
  const auto back = decode(bytes);
  ASSERT_THAT(back, fails_with(errc::version_mismatch, HasSubstr("version 3")));
}

}  // namespace
}  // namespace troupe::kvcache
