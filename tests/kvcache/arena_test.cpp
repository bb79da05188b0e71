#include "troupe/kvcache/arena.hpp"

#include <algorithm>

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

TEST(arena, the_smallest_gap_that_fits_is_taken_and_of_equals_the_lowest) {
  arena a{150};
  const auto first = a.allocate(30, 1).value();
  EXPECT_EQ(a.allocate(10, 1).value().offset, 30U);
  const auto second = a.allocate(20, 1).value();
  EXPECT_EQ(a.allocate(10, 1).value().offset, 60U);
  const auto third = a.allocate(20, 1).value();
  EXPECT_EQ(a.allocate(10, 1).value().offset, 90U);
  for (const auto& one : {first, second, third}) ASSERT_TRUE(a.free(one));
  EXPECT_EQ(a.allocate(15, 1).value().offset, 40U);
  EXPECT_EQ(a.allocate(15, 1).value().offset, 70U);
  EXPECT_EQ(a.allocate(35, 1).value().offset, 100U);
  EXPECT_EQ(a.allocate(15, 1).value().offset, 135U);
  EXPECT_EQ(a.allocate(15, 1).value().offset, 0U);
}

TEST(arena, ranges_are_aligned_and_the_padding_stays_usable) {
  arena a{256};
  ASSERT_TRUE(a.allocate(1, 1));
  EXPECT_EQ(a.allocate(64, 64).value().offset, 64U);
  EXPECT_EQ(a.allocate(63, 1).value().offset, 1U);
}

TEST(arena, neighbouring_gaps_become_one) {
  arena a{90};
  const auto x = a.allocate(30, 1).value();
  const auto y = a.allocate(30, 1).value();
  const auto z = a.allocate(30, 1).value();
  ASSERT_TRUE(a.free(x));
  ASSERT_TRUE(a.free(z));
  EXPECT_EQ(a.counters().gaps, 2U);
  ASSERT_TRUE(a.free(y));
  EXPECT_EQ(a.counters().gaps, 1U);
  EXPECT_EQ(a.counters().largest_free, 90U);
  EXPECT_EQ(a.allocate(90, 1).value().offset, 0U);
}

TEST(arena, what_does_not_fit_is_exhausted_and_the_sentence_has_the_largest_gap) {
  arena a{90};
  const auto x = a.allocate(30, 1).value();
  ASSERT_TRUE(a.allocate(30, 1));
  ASSERT_TRUE(a.free(x));
  const auto refused = a.allocate(40, 1);
  ASSERT_THAT(refused, fails_with(errc::pool_exhausted,
                                  HasSubstr("60 of 90 are free, the largest gap has 30")));
  EXPECT_FALSE(a.allocate(~0ULL, 1));
  EXPECT_EQ(a.allocate(10, std::uint64_t{1} << 63U).value().offset, 0U);
  EXPECT_FALSE(a.allocate(10, std::uint64_t{1} << 63U));
}

TEST(arena, nothing_and_odd_alignments_are_refused) {
  arena a{90};
  EXPECT_EQ(a.allocate(0, 1).error().code, errc::invalid_config);
  EXPECT_EQ(a.allocate(1, 0).error().code, errc::invalid_config);
  EXPECT_EQ(a.allocate(1, 48).error().code, errc::invalid_config);
  EXPECT_FALSE(arena{0}.allocate(1, 1));
}

TEST(arena, double_stale_inner_and_foreign_frees_are_errors_that_say_which) {
  arena a{90};
  const auto x = a.allocate(30, 1).value();
  const auto y = a.allocate(30, 1).value();
  const auto refused = [&](const arena_range& range, const char* why) {
    const auto freed = a.free(range);
    ASSERT_THAT(freed, fails_with(errc::not_found, HasSubstr(why)));
  };
  refused({y.offset, y.size - 1, y.serial}, "another size");
  refused({y.offset + 1, y.size, y.serial}, "inside another");
  refused({80, 5, 9}, "never given out");
  ASSERT_TRUE(a.free(x));
  refused(x, "freed before");
  const auto again = a.allocate(30, 1).value();
  EXPECT_EQ(again.offset, x.offset);
  refused(x, "given out again");
  EXPECT_EQ(a.counters().used, 60U);
}

TEST(arena, agrees_with_a_naive_byte_map_over_half_a_million_operations) {
  constexpr std::uint64_t size = 200;
  dice d{1};
  arena a{size};
  std::vector<std::uint64_t> owner(size, 0);  // id of the range that each byte belongs to
  std::vector<arena_range> known;             // live and freed ranges
  for (int step = 0; step < troupe::testing::tries(500'000); ++step) {
    if (d.one_in(2)) {
      const auto bytes = d.roll<std::uint64_t>(1, d.one_in(10) ? 120 : 24);
      const auto alignment = std::uint64_t{1} << d.roll(0, 5);
      std::uint64_t expected = size;
      std::uint64_t smallest = size + 1;
      for (std::uint64_t at = 0, end = 0; at < size; at = end + 1) {
        for (end = at; end < size && owner[end] == 0;) ++end;
        const auto begin = (at + alignment - 1) / alignment * alignment;
        if (end - at >= smallest || begin + bytes > end) continue;
        smallest = end - at;
        expected = begin;
      }
      const auto got = a.allocate(bytes, alignment);
      ASSERT_EQ(got.has_value(), expected < size) << step;
      if (!got) continue;
      ASSERT_EQ(got->offset, expected) << step;
      std::fill_n(owner.begin() + static_cast<std::ptrdiff_t>(got->offset), bytes, got->serial);
      known.push_back(*got);
    } else if (!known.empty()) {
      const auto which = d.roll<std::size_t>(0, known.size() - 1);
      auto range = known[which];
      if (d.one_in(20)) range.offset += d.roll<std::uint64_t>(0, 3);
      if (d.one_in(20)) range.size += d.roll<std::uint64_t>(0, 3);
      const bool live = range.offset == known[which].offset && range.size == known[which].size &&
                        owner[range.offset] == range.serial;
      ASSERT_EQ(a.free(range).has_value(), live) << step;
      if (live) {
        std::fill_n(owner.begin() + static_cast<std::ptrdiff_t>(range.offset), range.size, 0U);
      }
      // Half of the freed ranges are kept, to be freed a second time.
      if (live && d.one_in(2)) known.erase(known.begin() + static_cast<std::ptrdiff_t>(which));
      if (known.size() > 64) {
        std::erase_if(known, [&](const arena_range& k) { return owner[k.offset] != k.serial; });
      }
    }
    const auto counters = a.counters();
    ASSERT_EQ(counters.free,
              static_cast<std::uint64_t>(std::count(owner.begin(), owner.end(), 0U)));
    ASSERT_EQ(counters.used + counters.free, size);
    std::uint64_t gaps = 0;
    for (std::size_t i = 0; i < size; ++i) {
      if (owner[i] == 0 && (i == 0 || owner[i - 1] != 0)) ++gaps;
    }
    ASSERT_EQ(counters.gaps, gaps);
  }
}

}  // namespace
}  // namespace troupe::kvcache
