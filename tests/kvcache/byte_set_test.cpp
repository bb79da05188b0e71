#include "troupe/kvcache/byte_set.hpp"

#include <algorithm>
#include <chrono>
#include <limits>
#include <set>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "random_layouts.hpp"
#include "sanitized.hpp"

namespace troupe {
namespace {

using kvcache::testing::dice;
constexpr std::uint64_t largest = std::numeric_limits<std::uint64_t>::max();

TEST(place_list, knows_how_far_consecutive_places_go) {
  const place_list places{{7, 5, 6, 6, 100, 0, 4'294'967'295U}};
  EXPECT_EQ(places.run_at(5), 3U);
  EXPECT_EQ(places.run_at(7), 1U);
  EXPECT_EQ(places.run_at(8), 0U);
  EXPECT_EQ(places.run_at(0), 1U);
  EXPECT_EQ(places.run_at(1), 0U);
  EXPECT_EQ(places.run_at(99), 0U);
  EXPECT_EQ(places.run_at(100), 1U);
  EXPECT_EQ(places.run_at(4'294'967'295U), 1U);
  EXPECT_EQ(places.run_at(4'294'967'296U), 0U);
  EXPECT_EQ(places.run_at(largest), 0U);
  EXPECT_EQ(place_list{}.run_at(0), 0U);
}

TEST(place_list, agrees_with_a_set_however_the_places_are_spread) {
  for (std::uint64_t seed = 1; seed <= troupe::testing::tries(2000U); ++seed) {
    dice d{seed};
    // Evenly spread, in a few distant clusters, or nearly without gaps.
    const std::uint64_t span = d.one_in(3) ? 40 : d.one_in(2) ? 5000 : 4'000'000'000U;
    std::vector<std::uint32_t> drawn;
    for (auto n = d.roll(0, 200); n > 0; --n) {
      const auto at = d.roll<std::uint32_t>(0, span);
      drawn.push_back(at);
      if (d.one_in(2)) drawn.push_back(at / 1000);
      if (d.one_in(2)) drawn.push_back(at + 1);
    }
    const std::set<std::uint64_t> all{drawn.begin(), drawn.end()};
    const place_list places{drawn};
    std::vector<std::uint64_t> asked{0, span, 4'294'967'296U};
    for (const auto at : drawn) asked.insert(asked.end(), {at, at + 1ULL, at == 0 ? 0 : at - 1ULL});
    for (const auto at : asked) {
      std::uint64_t expected = 0;
      while (all.contains(at + expected)) ++expected;
      ASSERT_EQ(places.run_at(at), expected) << "seed " << seed << ", place " << at;
    }
  }
}

TEST(byte_set, a_range_across_two_extents_that_touch_is_covered) {
  const byte_set permitted{{30, 10, 0, 1}, {0, 10, 0, 1}, {10, 10, 0, 1}};
  EXPECT_TRUE(permitted.covers({5, 10, 0, 1}));
  EXPECT_FALSE(permitted.covers({15, 10, 0, 1}));
  EXPECT_FALSE(permitted.covers({25, 10, 0, 1}));
  EXPECT_TRUE(permitted.covers({0, 10, 10, 2}));
  EXPECT_FALSE(byte_set{}.covers({0, 1, 0, 1}));
  EXPECT_TRUE(byte_set{}.covers({0, 0, 0, 1}));
}

TEST(byte_set, ranges_that_wrap_are_never_covered) {
  const byte_set permitted{{0, 1000, 0, 1}};
  EXPECT_FALSE(permitted.covers({largest, 2, 0, 1}));
  EXPECT_FALSE(permitted.covers({0, largest, 0, 1}));
  EXPECT_FALSE(permitted.covers({0, 1, largest, 0xffff'ffffU}));
}

TEST(byte_set, four_billion_repetitions_are_judged_by_arithmetic) {
  EXPECT_TRUE((byte_set{{0, std::uint64_t{1} << 40U, 0, 1}}.covers({0, 8, 64, 0xffff'ffffU})));
  const byte_set strided{{16, 8, 64, 0xffff'ffffU}};
  EXPECT_TRUE(strided.covers({18, 4, 64, 0xffff'ffffU}));
  EXPECT_FALSE((byte_set{{16, 8, 64, 0xffff'fffeU}}.covers({18, 4, 64, 0xffff'ffffU})));
}

TEST(byte_set, knows_its_ends_and_whether_they_lie_in_a_region) {
  const byte_set listed{{100, 10, 50, 3}, {20, 5, 0, 1}};
  EXPECT_EQ(listed.hull(), (extent{20, 190, 0, 1}));
  EXPECT_TRUE(listed.check_within(210));
  const auto too_small = listed.check_within(209);
  ASSERT_FALSE(too_small);
  EXPECT_EQ(too_small.error().code, errc::out_of_range);
  EXPECT_EQ(byte_set{}.hull().length, 0U);

  const auto form = std::make_shared<const place_form>(
      std::vector<place_form::piece>{{1000, 10, 100}, {1050, 20, 100}}, 50);
  const auto list = std::make_shared<const place_list>(std::vector<std::uint32_t>{4, 9});
  const byte_set placed{{{form, list}}, {}};
  EXPECT_EQ(placed.hull(), (extent{1400, 570, 0, 1}));
  EXPECT_TRUE(placed.check_within(1970));
  EXPECT_FALSE(placed.check_within(1969));
}

/// A bit per byte, marked along with what makes the set.
struct marked_bytes {
  std::vector<bool> bytes = std::vector<bool>(2048, false);
  void mark(std::uint64_t offset, std::uint64_t length) {
    for (std::uint64_t b = 0; b < length; ++b) bytes.at(offset + b) = true;
  }
  [[nodiscard]] bool all(const extent& range) const {
    for (std::uint32_t i = 0; i < range.count; ++i) {
      for (std::uint64_t b = 0; b < range.length; ++b) {
        const auto at = range.offset + i * range.stride + b;
        if (at >= bytes.size() || !bytes[at]) return false;
      }
    }
    return true;
  }
};

extent some_range(dice& d, std::uint64_t end) {
  extent range{d.roll<std::uint64_t>(0, end), d.roll<std::uint64_t>(1, 30), 0, d.roll(1, 6)};
  if (d.one_in(4)) range.length = d.roll<std::uint64_t>(1, 400);
  if (range.count > 1) {
    range.stride =
        range.length + (d.one_in(2) ? d.roll<std::uint64_t>(0, 5) : d.roll<std::uint64_t>(0, 90));
  }
  return range;
}

TEST(byte_set, of_extents_agrees_with_marking_bytes) {
  std::uint64_t inside = 0;
  for (std::uint64_t seed = 1; seed <= troupe::testing::tries(5000U); ++seed) {
    dice d{seed};
    marked_bytes marked;
    std::vector<extent> permitted;
    for (auto n = d.roll(0, 6); n > 0; --n) {
      extent e{d.roll<std::uint64_t>(0, 60), d.roll<std::uint64_t>(1, 40), 0, d.roll(1, 5)};
      if (d.one_in(8)) e.count = d.roll(1, 60);  // worth keeping as it is
      e.stride = e.count == 1 ? 0 : d.roll<std::uint64_t>(1, 30);
      permitted.push_back(e);
      for (std::uint32_t i = 0; i < e.count; ++i) marked.mark(e.offset + i * e.stride, e.length);
    }
    const byte_set set{permitted};
    for (int i = 0; i < 10; ++i) {
      const auto range = some_range(d, 100);
      const bool all = marked.all(range);
      inside += all ? 1 : 0;
      ASSERT_EQ(set.covers(range), all) << "seed " << seed;
    }
  }
  EXPECT_GT(inside, troupe::testing::tries(1000U));
}

TEST(byte_set, of_places_agrees_with_marking_bytes) {
  std::uint64_t inside = 0;
  for (std::uint64_t seed = 1; seed <= troupe::testing::tries(5000U); ++seed) {
    dice d{seed};
    // Pieces of one block, adjacent or apart, then the next layer's, with the same stride or
    // another.
    const auto blocks = d.roll(1, 12);
    std::vector<place_form::piece> pieces;
    std::uint64_t base = d.roll<std::uint64_t>(0, 10);
    for (auto layers = d.roll(1, 3); layers > 0; --layers) {
      std::uint64_t offset = 0;
      std::vector<place_form::piece> of_layer;
      for (auto n = d.roll(1, 3); n > 0; --n) {
        const auto length = d.roll<std::uint64_t>(1, 12);
        of_layer.push_back({base + offset, length, 0});
        offset += length + (d.one_in(2) ? 0 : d.roll<std::uint64_t>(1, 4));
      }
      const auto stride = offset + (d.one_in(2) ? 0 : d.roll<std::uint64_t>(1, 4));
      for (auto& p : of_layer) p.stride = stride;
      pieces.insert(pieces.end(), of_layer.begin(), of_layer.end());
      base += blocks * stride + (d.one_in(2) ? 0 : d.roll<std::uint64_t>(1, 9));
    }
    marked_bytes marked;
    std::vector<std::uint32_t> places;
    for (std::uint32_t b = 0; b < blocks; ++b) {
      if (d.one_in(3)) continue;
      places.push_back(b);
      for (const auto& p : pieces) marked.mark(p.offset + b * p.stride, p.length);
    }
    std::vector<extent> listed;
    if (d.one_in(2)) {
      // For example part of a block, or a state's slot.
      listed.push_back({d.roll<std::uint64_t>(0, base), d.roll<std::uint64_t>(1, 20), 0, 1});
      marked.mark(listed.back().offset, listed.back().length);
    }
    std::vector<byte_set::placed> placed{{std::make_shared<const place_form>(pieces, blocks),
                                          std::make_shared<const place_list>(places)}};
    if (d.one_in(3)) {
      // A piece of another group of layers, over the same bytes or beside them.
      const auto at = d.roll<std::uint64_t>(0, base);
      const auto length = d.roll<std::uint64_t>(1, 9);
      const auto stride = length + d.roll<std::uint64_t>(0, 4);
      std::vector<std::uint32_t> others;
      for (std::uint32_t b = 0; b < blocks; ++b) {
        if (d.one_in(2)) continue;
        others.push_back(b);
        marked.mark(at + b * stride, length);
      }
      placed.push_back({std::make_shared<const place_form>(
                            std::vector<place_form::piece>{{at, length, stride}}, blocks),
                        std::make_shared<const place_list>(others)});
    }
    const byte_set set{placed, listed};
    for (int i = 0; i < 20; ++i) {
      const auto range = some_range(d, base);
      const bool all = marked.all(range);
      inside += all ? 1 : 0;
      ASSERT_EQ(set.covers(range), all) << "seed " << seed;
    }
    for (std::uint64_t at = 0; at < base + 40; ++at) {
      ASSERT_EQ(set.covers({at, 1, 0, 1}), marked.all({at, 1, 0, 1})) << "seed " << seed;
    }
  }
  EXPECT_GT(inside, troupe::testing::tries(1000U));
}

TEST(byte_set, copies_and_equals_by_what_it_was_made_from) {
  const byte_set a{{0, 10, 0, 1}, {20, 10, 0, 1}};
  const byte_set same{std::vector<extent>{{20, 10, 0, 1}, {0, 10, 0, 1}}};
  EXPECT_EQ(a, same);
  EXPECT_NE(a, (byte_set{{0, 30, 0, 1}}));
  EXPECT_TRUE(a.is_listed());
  EXPECT_EQ(a.whole(), nullptr);
  const byte_set one{{5, 7, 0, 1}};
  ASSERT_NE(one.whole(), nullptr);
  EXPECT_EQ(*one.whole(), (extent{5, 7, 0, 1}));
}

}  // namespace
}  // namespace troupe
