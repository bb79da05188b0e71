#include "troupe/io/plans.hpp"

#include <cstring>
#include <map>
#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace troupe::io {

namespace {

/// Bytes [0, 1000) at address 10'000, in three regions.
described_memory in_three() {
  return {.number = 1,
          .rights = transport::access::read_write,
          .parts = {{region_id{1}, 500, 10'000, 100},
                    {region_id{2}, 0, 10'100, 300},
                    {region_id{3}, 7, 10'400, 600}}};
}
described_memory in_one(std::uint64_t number = 2) {
  return {.number = number,
          .rights = transport::access::read_write,
          .parts = {{region_id{9}, 0, 50'000, 1000}}};
}

placed_list placed(const described_memory& where, const std::vector<entry>& entries) {
  placed_list made;
  for (const auto& one : entries) EXPECT_TRUE(add_entry(made, where, one));
  return made;
}

errc code_of(const described_memory& where, const entry& what) {
  placed_list made;
  const auto added = add_entry(made, where, what);
  if (!added) {
    EXPECT_EQ(made.entries(), 0U);
  }
  return added ? errc{} : added.error().code;
}

}  // namespace

TEST(plans_test, a_pair_of_more_segments_than_a_transfer_has_is_refused_at_once) {
  constexpr std::uint64_t length = std::uint64_t{1} << 40;
  const described_memory wide{.number = 3,
                              .rights = transport::access::read_write,
                              .parts = {{region_id{4}, 0, 1 << 20, length}}};
  // The repetitions of each list cut those of the other: 2^30 segments, more than memory holds.
  const auto twos = placed(wide, {{1 << 20, 2, 4, 3U << 28}});
  const auto threes = placed(wide, {{1 << 20, 3, 6, 2U << 28}});
  const auto made = pair_up(twos, {}, threes, {}, merge_entries::no);
  ASSERT_FALSE(made);
  EXPECT_EQ(made.error().code, errc::overloaded);
}

TEST(plans_test, what_a_group_touches_is_compared_with_what_the_owner_has) {
  const auto owned = in_three();
  planned_batch::group group{.local = region_id{8},
                             .remote_memory = 1,
                             .remote = region_id{1},
                             .segments = {{0, 500, 100}, {0, 500, 10, 0, 10, 10}}};
  EXPECT_TRUE(check_within(group, owned));
  for (const auto& bad : std::vector<segment>{
           {0, 499, 2}, {0, 500, 101}, {0, 600, 1}, {0, 500, 10, 0, 10, 11}, {0, UINT64_MAX, 2}}) {
    group.segments = {bad};
    const auto within = check_within(group, owned);
    ASSERT_FALSE(within) << bad.remote_offset << " " << bad.length;
    EXPECT_EQ(within.error().code, errc::out_of_range);
  }
  group.segments = {{0, 500, 1}};
  group.remote = region_id{9};
  EXPECT_FALSE(check_within(group, owned)) << "a region of another memory";
}

TEST(plans_test, an_entry_outside_its_memory_is_refused_also_where_it_wraps) {
  const auto where = in_one();
  EXPECT_EQ(code_of(where, {50'000, 1000}), errc{});
  EXPECT_EQ(code_of(where, {50'999, 1}), errc{});
  for (const auto& bad : std::vector<entry>{{50'000, 1001},
                                            {49'999, 2},
                                            {51'000, 1},
                                            {50'000, 0},
                                            {50'000, 8, 8, 0},
                                            {50'000, 8, 7, 2},
                                            {50'000, 8, 100, 11},
                                            {50'000, UINT64_MAX},
                                            {UINT64_MAX - 3, 8},
                                            {50'000, 8, UINT64_MAX, 2},
                                            {50'000, 8, std::uint64_t{1} << 40, 1U << 31}}) {
    EXPECT_EQ(code_of(where, bad), errc::out_of_range) << bad.address << " " << bad.length;
  }
}

TEST(plans_test, an_entry_over_borders_is_cut_there_and_merged_again_where_both_sides_go_on) {
  const auto list = placed(in_three(), {{10'050, 400}});
  ASSERT_EQ(list.runs.size(), 3U);
  EXPECT_EQ(list.runs[0].offset, 550U);
  EXPECT_EQ(list.runs[0].length, 50U);
  EXPECT_EQ(list.runs[1].length, 300U);
  EXPECT_EQ(list.runs[2].offset, 7U);
  const auto whole = pair_up(placed(in_one(), {{50'000, 400}}), {}, list, {}, merge_entries::no);
  ASSERT_TRUE(whole);
  EXPECT_EQ(whole->groups.size(), 3U);  // one for each remote region
  EXPECT_EQ(whole->bytes, 400U);
}

TEST(plans_test, neighbours_are_merged_only_where_that_is_asked_for) {
  const std::vector<entry> row{{50'000, 10}, {50'010, 10}, {50'020, 10}, {50'500, 10}};
  const auto local = placed(in_one(2), row);
  const auto remote = placed(in_one(3), row);
  const auto merged = pair_up(local, {}, remote, {}, merge_entries::yes).value();
  ASSERT_EQ(merged.groups.size(), 1U);
  EXPECT_EQ(merged.groups[0].segments.size(), 2U);
  EXPECT_EQ(merged.groups[0].segments[0].length, 30U);
  EXPECT_EQ(merged.entries_of(std::vector<std::uint32_t>{0}),
            (std::vector<std::uint32_t>{0, 1, 2}));
  EXPECT_EQ(merged.entries_of(std::vector<std::uint32_t>{1}), (std::vector<std::uint32_t>{3}));
  const auto apart = pair_up(local, {}, remote, {}, merge_entries::no).value();
  EXPECT_EQ(apart.groups[0].segments.size(), 4U);
  EXPECT_EQ(apart.entries_of(std::vector<std::uint32_t>{2}), (std::vector<std::uint32_t>{2}));
  const std::vector<std::uint32_t> backwards{2, 1, 0};
  const auto turned = pair_up(local, backwards, remote, backwards, merge_entries::yes).value();
  EXPECT_EQ(turned.groups[0].segments.size(), 3U);
}

TEST(plans_test, equal_strides_stay_one_segment_and_others_are_matched_byte_by_byte) {
  const auto strided = placed(in_one(2), {{50'000, 8, 100, 5}});
  const auto same =
      pair_up(strided, {}, placed(in_one(3), {{50'004, 8, 50, 5}}), {}, merge_entries::no).value();
  ASSERT_EQ(same.groups[0].segments.size(), 1U);
  EXPECT_EQ(same.groups[0].segments[0], (segment{0, 4, 8, 100, 50, 5}));
  const auto packed =
      pair_up(strided, {}, placed(in_one(3), {{50'000, 40}}), {}, merge_entries::no).value();
  ASSERT_EQ(packed.groups[0].segments.size(), 5U);
  EXPECT_EQ(packed.groups[0].segments[3], (segment{300, 24, 8, 0, 0, 1}));
  EXPECT_EQ(packed.entries_of(std::vector<std::uint32_t>{3}), (std::vector<std::uint32_t>{0}));
}

TEST(plans_test, pairs_that_do_not_fit_are_refused_by_number) {
  const auto local = placed(in_one(2), {{50'000, 10}, {50'100, 20}});
  const auto remote = placed(in_one(3), {{50'000, 10}, {50'100, 21}});
  const auto code = [&](std::vector<std::uint32_t> here, std::vector<std::uint32_t> there) {
    const auto made = pair_up(local, here, remote, there, merge_entries::no);
    return made ? std::string{} : made.error().message;
  };
  EXPECT_THAT(code({}, {}), ::testing::HasSubstr("pair 1: 20 local bytes and 21 remote ones"));
  EXPECT_THAT(code({0, 2}, {0, 0}), ::testing::HasSubstr("pair 1: index 2"));
  EXPECT_THAT(code({0}, {7}), ::testing::HasSubstr("pair 0: index 7"));
  EXPECT_THAT(code({0}, {0, 0}), ::testing::HasSubstr("1 local entries and 2 remote ones"));
  EXPECT_EQ(code({0, 0}, {0, 0}), "");
  EXPECT_FALSE(pair_up({}, {}, {}, {}, merge_entries::no));
}

TEST(plans_test, entries_of_many_memories_are_known_by_their_segments) {
  constexpr std::uint32_t memories = 1000;
  placed_list here;
  placed_list there;
  for (std::uint32_t i = 0; i < 2 * memories; ++i) {  // each memory twice, far apart
    const auto number = i % memories + 1;
    const described_memory where{.number = number,
                                 .rights = transport::access::read_write,
                                 .parts = {{region_id{number}, 0, 50'000, 1000}}};
    ASSERT_TRUE(add_entry(here, in_one(), {50'000, 8}));
    ASSERT_TRUE(add_entry(there, where, {50'000, 8}));
  }
  const auto made = pair_up(here, {}, there, {}, merge_entries::yes).value();
  ASSERT_EQ(made.groups.size(), memories);
  // Segments are counted group by group. There is no segment 2000.
  EXPECT_EQ(made.entries_of(std::vector<std::uint32_t>{0, 1, 5, 1999, 2000}),
            (std::vector<std::uint32_t>{0, 1000, 1002, 1999}));
}

// The segments must move the same bytes as a loop over the entries' bytes.
TEST(plans_test, any_two_lists_move_the_bytes_that_they_name) {
  std::mt19937 random{42};  // NOLINT(cert-msc51-cpp): the same lists each time
  const auto below = [&](std::uint64_t n) { return random() % n; };
  for (int round = 0; round < 300; ++round) {
    const auto a = in_three();
    const auto b = in_one();
    std::vector<entry> from;
    std::vector<entry> to;
    for (std::uint64_t i = 0, count = 1 + below(6); i < count; ++i) {
      const std::uint64_t length = 1 + below(30);
      const auto repeats = static_cast<std::uint32_t>(1 + below(4));
      const std::uint64_t stride = length + below(60);
      const auto hull = (repeats - 1) * stride + length;
      from.push_back({10'000 + below(1000 - hull), length, stride, repeats});
      if (below(2) == 0) {
        to.push_back({50'000 + below(1000 - hull), length, stride, repeats});
      } else {
        to.push_back({50'000 + below(1000 - length * repeats), length * repeats});
      }
    }
    const auto merge = below(2) == 0 ? merge_entries::yes : merge_entries::no;
    const auto made = pair_up(placed(a, from), {}, placed(b, to), {}, merge);
    ASSERT_TRUE(made) << made.error().message;
    // Source address -> destination address of every byte.
    std::vector<std::pair<std::uint64_t, std::uint64_t>> expected;
    const auto addresses = [](const entry& one) {
      std::vector<std::uint64_t> all;
      for (std::uint32_t r = 0; r < one.count; ++r) {
        for (std::uint64_t i = 0; i < one.length; ++i)
          all.push_back(one.address + r * one.stride + i);
      }
      return all;
    };
    for (std::size_t i = 0; i < from.size(); ++i) {
      const auto here = addresses(from[i]);
      const auto there = addresses(to[i]);
      for (std::size_t n = 0; n < here.size(); ++n) expected.emplace_back(here[n], there[n]);
    }
    std::vector<std::pair<std::uint64_t, std::uint64_t>> moved;
    const auto address = [](const described_memory& of, region_id region, std::uint64_t offset) {
      for (const auto& part : of.parts) {
        if (part.region == region) return part.address + (offset - part.offset);
      }
      return std::uint64_t{0};
    };
    std::vector<std::uint32_t> all_segments;
    for (const auto& group : made->groups) {
      ASSERT_EQ(group.segments.size(), group.entries.size());
      for (const auto& one : group.segments) {
        all_segments.push_back(static_cast<std::uint32_t>(all_segments.size()));
        for (std::uint32_t r = 0; r < one.count; ++r) {
          for (std::uint64_t i = 0; i < one.length; ++i) {
            moved.emplace_back(
                address(a, group.local, one.local_offset + r * one.local_stride + i),
                address(b, group.remote, one.remote_offset + r * one.remote_stride + i));
          }
        }
      }
    }
    std::ranges::sort(expected);
    std::ranges::sort(moved);
    ASSERT_EQ(moved, expected) << "round " << round;
    EXPECT_EQ(made->entries_of(all_segments), made->all_entries());
  }
}

}  // namespace troupe::io
