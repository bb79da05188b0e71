// There is one definition of where a token's head lies: `locate` must find what plans move and
// grants open.

#include <algorithm>
#include <numeric>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "troupe/kvcache/cache_map.hpp"
#include "troupe/kvcache/layout.hpp"
#include "troupe/kvcache/plan.hpp"

#include "random_layouts.hpp"

namespace troupe::kvcache {
namespace {

using testing::dice;
using ::testing::HasSubstr;

/// A rank's regions, with the blocks of one request.
struct located_cache {
  cache_layout layout;
  std::vector<std::vector<std::uint8_t>> memory;
  std::vector<block_id> blocks;

  located_cache(cache_layout of, std::uint32_t wanted, dice& d) : layout{std::move(of)} {
    for (const auto size : region_sizes(layout)) memory.emplace_back(size);
    std::vector<std::uint32_t> all(layout.blocks);
    std::iota(all.begin(), all.end(), 0U);
    for (std::size_t i = all.size(); i > 1; --i) {
      std::swap(all[i - 1], all[d.roll<std::size_t>(0, i - 1)]);
    }
    for (std::uint32_t i = 0; i < wanted; ++i) blocks.push_back({all[i]});
  }
  /// Calls `visit(place, bytes)` for each head of each plane at each token.
  template <class Visit>
  void each_head(std::uint32_t tokens, Visit visit) const {
    for (std::uint32_t l = 0; l < layout.layers.size(); ++l) {
      const auto& planes = layout.layers[l].planes;
      for (std::uint32_t p = 0; p < planes.size(); ++p) {
        for (std::uint32_t t = 0; t < tokens; ++t) {
          for (std::uint32_t h = 0; h < planes[p].heads; ++h) {
            const cache_place place{l, p, t, h};
            visit(place, locate(layout, blocks, place).value());
          }
        }
      }
    }
  }
  [[nodiscard]] std::span<std::uint8_t> at(const region_bytes& where) {
    return std::span{memory[where.region]}.subspan(where.offset, where.length);
  }
};

std::uint8_t value_of(const cache_place& place, std::size_t byte) {
  auto value = std::uint64_t{place.layer} * 5 + place.plane;
  value = (value * 131 + place.token) * 131 + place.head;
  return static_cast<std::uint8_t>((value * 131 + byte) * 0x9E3779B97F4A7C15U >> 56U);
}

void carry_out(const transfer_plan& plan, const located_cache& from, located_cache& to) {
  for (const auto& piece : plan.pieces) {
    const auto& source = from.memory[piece.local_region];
    auto& target = to.memory[piece.remote_region];
    for (const auto& s : piece.segments) {
      for (std::uint32_t i = 0; i < s.count; ++i) {
        std::copy_n(source.data() + s.local_offset + i * s.local_stride, s.length,
                    target.data() + s.remote_offset + i * s.remote_stride);
      }
    }
  }
}

class head_of_a_token : public ::testing::TestWithParam<std::uint64_t> {
 protected:
  dice d{GetParam()};
  cache_shape model{testing::random_model(d)};
  std::uint32_t ranks{d.roll(1, 4)};
  std::uint32_t rank{d.roll(0, ranks - 1)};
  std::uint32_t wanted{d.roll(1, 6)};
  std::uint32_t tokens{wanted * model.block_tokens - d.roll(0, model.block_tokens - 1)};

  located_cache cache() {
    const auto how = testing::random_arrangement(d);
    const bool unnamed = d.one_in(4);
    return {testing::random_layout(model, wanted + d.roll(0, 3), rank, ranks, how, unnamed, d),
            wanted, d};
  }
};

TEST_P(head_of_a_token, is_found_where_the_plan_moves_it_from_and_to) {
  auto source = cache();
  auto target = cache();
  source.each_head(tokens, [&](const cache_place& place, const region_bytes& where) {
    std::size_t byte = 0;
    for (auto& one : source.at(where)) one = value_of(place, byte++);
  });
  const auto geometry =
      transfer_geometry::create(source.layout, target.layout, data_flow::to_remote).value();
  const auto layers = static_cast<std::uint32_t>(source.layout.layers.size());
  carry_out(geometry.plan({0, layers}, {0, tokens}, source.blocks, target.blocks).value(), source,
            target);
  target.each_head(tokens, [&](const cache_place& place, const region_bytes& where) {
    std::size_t byte = 0;
    for (const auto one : target.at(where)) {
      ASSERT_EQ(one, value_of(place, byte++)) << "layer " << place.layer << " plane " << place.plane
                                              << " token " << place.token << " head " << place.head;
    }
  });
}

TEST_P(head_of_a_token, lies_in_what_a_grant_of_the_tokens_opens_and_all_of_that_is_some_head) {
  const auto held = cache();
  const auto opened =
      cache_map::create(held.layout).value().bytes_of({0, tokens}, held.blocks).value();
  std::vector<std::vector<bool>> found;
  for (const auto& region : held.memory) found.emplace_back(region.size(), false);
  held.each_head(tokens, [&](const cache_place&, const region_bytes& where) {
    EXPECT_TRUE(opened.at(where.region).covers({where.offset, where.length, 0, 1}));
    for (auto at = where.offset; at < where.offset + where.length; ++at) {
      EXPECT_FALSE(found[where.region][at]) << "two heads at one byte";
      found[where.region][at] = true;
    }
  });
  for (std::size_t region = 0; region < found.size(); ++region) {
    for (std::size_t at = 0; at < found[region].size(); ++at) {
      ASSERT_EQ(opened[region].covers({at, 1, 0, 1}), found[region][at]);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(of_layouts, head_of_a_token, ::testing::Range<std::uint64_t>(1, 61));

TEST(locating, what_is_not_there_is_out_of_range_and_named) {
  cache_shape shape;
  shape.layers = attention_layers(2, 4, 8);
  shape.layers.push_back({layer_kind::recurrent, 0, 0});
  shape.blocks = 8;
  shape.tp_size = 2;
  const auto layout = make_layout(shape, {}).value();
  const std::vector<block_id> blocks{{3}, {8}};
  const auto refused = [&](const cache_place& place) {
    const auto found = locate(layout, blocks, place);
    return found ? std::string{} : to_string(found.error());
  };
  EXPECT_EQ(refused({1, 1, 15, 1}), "");
  EXPECT_THAT(refused({3, 0, 0, 0}), HasSubstr("layer 3 of 3"));
  EXPECT_THAT(refused({0, 2, 0, 0}), HasSubstr("layer 0: plane 2 of 2"));
  EXPECT_THAT(refused({2, 0, 0, 0}), HasSubstr("layer 2: plane 0 of 0"));
  EXPECT_THAT(refused({0, 0, 0, 2}), HasSubstr("layer 0: head 2 of 2"));
  EXPECT_THAT(refused({0, 0, 32, 0}), HasSubstr("token 32 of 32"));
  EXPECT_THAT(refused({0, 0, 16, 0}), HasSubstr("block 8 of 8"));
  EXPECT_EQ(locate(layout, blocks, {0, 0, 16, 0}).error().code, errc::out_of_range);
}

}  // namespace
}  // namespace troupe::kvcache
