#include "troupe/kvcache/segment.hpp"

#include <limits>
#include <set>

#include <gtest/gtest.h>

#include "random_layouts.hpp"
#include "sanitized.hpp"

namespace troupe {
namespace {

using kvcache::testing::dice;
constexpr std::uint64_t largest = std::numeric_limits<std::uint64_t>::max();

TEST(segment, a_range_within_the_size_is_accepted_up_to_the_last_byte) {
  EXPECT_TRUE(check_range({0, 100, 0, 1}, 100));
  EXPECT_TRUE(check_range({99, 1, 0, 1}, 100));
  EXPECT_TRUE(check_range({100, 0, 0, 1}, 100));
  EXPECT_TRUE(check_range({10, 10, 20, 5}, 100));
}

TEST(segment, a_range_that_ends_past_the_size_is_refused_with_its_numbers) {
  const auto checked = check_range({99, 2, 0, 1}, 100);
  ASSERT_FALSE(checked);
  EXPECT_EQ(checked.error().code, errc::out_of_range);
  EXPECT_NE(checked.error().message.find("99"), std::string::npos);
  EXPECT_NE(checked.error().message.find("100"), std::string::npos);
  EXPECT_FALSE(check_range({101, 0, 0, 1}, 100));
  EXPECT_FALSE(check_range({10, 10, 20, 6}, 100));
}

TEST(segment, sums_that_wrap_are_refused) {
  EXPECT_FALSE(check_range({largest, 2, 0, 1}, 100));
  EXPECT_FALSE(check_range({2, largest, 0, 1}, 100));
  EXPECT_FALSE(check_range({largest - 1, largest, 0, 1}, largest));
  EXPECT_FALSE(check_range({0, 1, largest, 3}, 100));
  EXPECT_FALSE(check_range({0, 1, (largest / 2) + 1, 3}, largest));
  EXPECT_FALSE(check_range({50, 1, std::uint64_t{1} << 63U, 0xffff'ffffU}, 100));
}

TEST(segment, a_range_that_overlaps_itself_or_repeats_no_time_is_refused) {
  EXPECT_FALSE(check_range({0, 10, 9, 2}, 100));
  EXPECT_FALSE(check_range({0, 10, 0, 0xffff'ffffU}, 100));
  EXPECT_FALSE(check_range({0, 0, 0, 2}, 100));
  EXPECT_FALSE(check_range({0, 10, 0, 0}, 100));
}

TEST(segment, the_sentence_names_the_segment_and_its_side) {
  const std::vector<segment> segments{{0, 0, 10, 0, 0, 1}, {95, 0, 10, 0, 0, 1}};
  const auto local = check_local(segments, 100);
  ASSERT_FALSE(local);
  EXPECT_NE(local.error().message.find("segment 1"), std::string::npos);
  EXPECT_TRUE(check_remote(segments, 100));
}

TEST(segment, a_segment_of_many_repetitions_counts_all_its_bytes) {
  const std::vector<segment> segments{{0, 0, 10, 20, 30, 4}, {0, 0, 5, 0, 0, 1}};
  EXPECT_EQ(total_bytes(segments), 45U);
}

TEST(covered, a_range_across_two_extents_that_touch_is_covered) {
  const std::vector<extent> permitted{{0, 10, 0, 1}, {10, 10, 0, 1}, {30, 10, 0, 1}};
  EXPECT_TRUE(covered({5, 10, 0, 1}, permitted));
  EXPECT_FALSE(covered({15, 10, 0, 1}, permitted));
  EXPECT_FALSE(covered({25, 10, 0, 1}, permitted));
  EXPECT_TRUE(covered({0, 10, 10, 2}, permitted));
  EXPECT_FALSE(covered({0, 1, 0, 1}, {}));
}

TEST(covered, ranges_that_wrap_are_never_covered) {
  const std::vector<extent> permitted{{0, 1000, 0, 1}};
  EXPECT_FALSE(covered({largest, 2, 0, 1}, permitted));
  EXPECT_FALSE(covered({0, largest, 0, 1}, permitted));
  EXPECT_FALSE(covered({0, 1, largest, 0xffff'ffffU}, permitted));
}

TEST(covered, four_billion_repetitions_are_judged_by_arithmetic) {
  const std::vector<extent> permitted{{0, std::uint64_t{1} << 40U, 0, 1}};
  EXPECT_TRUE(covered({0, 8, 64, 0xffff'ffffU}, permitted));
  const std::vector<extent> strided{{16, 8, 64, 0xffff'ffffU}};
  EXPECT_TRUE(covered({18, 4, 64, 0xffff'ffffU}, strided));
  EXPECT_TRUE(covered({18, 4, 128, 0x7fff'ffffU}, strided));
  EXPECT_FALSE(covered({18, 4, 64, 0xffff'ffffU}, std::vector<extent>{{16, 8, 64, 0xffff'fffeU}}));
}

TEST(covered, agrees_with_marking_bytes) {
  int inside = 0;
  for (std::uint64_t seed = 1; seed <= troupe::testing::tries(20'000U); ++seed) {
    dice d{seed};
    std::vector<bool> marked(256, false);
    std::vector<extent> permitted;
    for (auto n = d.roll(0, 4); n > 0; --n) {
      extent e{d.roll<std::uint64_t>(0, 60), d.roll<std::uint64_t>(1, 20), 0, d.roll(1, 5)};
      e.stride = e.count == 1 ? 0 : d.roll<std::uint64_t>(1, 30);
      permitted.push_back(e);
      for (std::uint32_t i = 0; i < e.count; ++i) {
        for (std::uint64_t b = 0; b < e.length; ++b) marked[e.offset + i * e.stride + b] = true;
      }
    }
    if (d.one_in(2)) {
      std::sort(permitted.begin(), permitted.end(),
                [](const extent& a, const extent& b) { return a.offset < b.offset; });
    }
    extent range{d.roll<std::uint64_t>(0, 70), d.roll<std::uint64_t>(1, 8), 0, d.roll(1, 4)};
    range.stride = range.count == 1 ? 0 : range.length + d.roll<std::uint64_t>(0, 20);
    bool all = true;
    for (std::uint32_t i = 0; i < range.count; ++i) {
      for (std::uint64_t b = 0; b < range.length; ++b) {
        all = all && marked[range.offset + i * range.stride + b];
      }
    }
    inside += all ? 1 : 0;
    ASSERT_EQ(covered(range, permitted), all) << "seed " << seed;
  }
  EXPECT_GT(inside, troupe::testing::tries(1000));
}

TEST(merge, contiguous_neighbours_become_one_and_equally_spaced_equals_a_stride) {
  const std::vector<segment> segments{{0, 100, 10, 0, 0, 1},
                                      {10, 110, 10, 0, 0, 1},
                                      {50, 200, 4, 0, 0, 1},
                                      {60, 300, 4, 0, 0, 1},
                                      {70, 400, 4, 0, 0, 1}};
  const std::vector<segment> expected{{0, 100, 20, 0, 0, 1}, {50, 200, 4, 10, 100, 3}};
  EXPECT_EQ(merge_segments(segments), expected);
}

TEST(merge, bytes_that_touch_on_one_side_only_stay_apart) {
  const std::vector<segment> segments{{0, 100, 10, 0, 0, 1}, {10, 90, 10, 0, 0, 1}};
  EXPECT_EQ(merge_segments(segments), segments);
}

TEST(merge, moves_the_same_bytes_in_never_more_segments) {
  for (std::uint64_t seed = 1; seed <= troupe::testing::tries(5'000U); ++seed) {
    dice d{seed};
    std::vector<segment> segments;
    std::uint64_t local = 0;
    std::uint64_t remote = 0;
    for (auto n = d.roll(0, 12); n > 0; --n) {
      segment s{local, remote, d.roll<std::uint64_t>(1, 2) * 4, 0, 0, d.roll(1, 3)};
      if (s.count > 1) {
        s.local_stride = s.length + d.roll<std::uint64_t>(0, 1) * 4;
        s.remote_stride = s.length + d.roll<std::uint64_t>(0, 1) * 4;
      }
      segments.push_back(s);
      local += s.length + (s.count - 1) * s.local_stride + d.roll<std::uint64_t>(0, 1) * 4;
      remote += s.length + (s.count - 1) * s.remote_stride + d.roll<std::uint64_t>(0, 1) * 4;
    }
    const auto moves = [](const std::vector<segment>& list) {
      std::vector<std::pair<std::uint64_t, std::uint64_t>> pairs;
      for (const auto& s : list) {
        for (std::uint32_t i = 0; i < s.count; ++i) {
          for (std::uint64_t b = 0; b < s.length; ++b) {
            pairs.emplace_back(s.local_offset + i * s.local_stride + b,
                               s.remote_offset + i * s.remote_stride + b);
          }
        }
      }
      return pairs;
    };
    const auto merged = merge_segments(segments);
    ASSERT_LE(merged.size(), segments.size());
    ASSERT_EQ(moves(merged), moves(segments)) << "seed " << seed;
    ASSERT_EQ(total_bytes(merged), total_bytes(segments));
    ASSERT_TRUE(check_local(merged, local + 8));
  }
}

}  // namespace
}  // namespace troupe
