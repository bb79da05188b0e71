#include "troupe/transport/rdma/work_cursor.hpp"

#include <map>
#include <random>

#include <gtest/gtest.h>

// However segments are cut into requests, the same bytes go to the same places, and no request is
// larger than allowed.
namespace troupe::transport::rdma {

namespace {

constexpr std::uint64_t local_base = 0x1000'0000;
constexpr std::uint64_t remote_base = 0x9000'0000;

/// remote byte -> local byte, for every byte.
using moves = std::map<std::uint64_t, std::uint64_t>;

moves naive(const std::vector<segment>& segments) {
  moves all;
  for (const auto& s : segments) {
    for (std::uint32_t i = 0; i < s.count; ++i) {
      for (std::uint64_t b = 0; b < s.length; ++b) {
        all[remote_base + s.remote_offset + i * s.remote_stride + b] =
            local_base + s.local_offset + i * s.local_stride + b;
      }
    }
  }
  return all;
}

struct cut {
  moves all;
  std::size_t requests{0};
  std::size_t twice{0};
};

cut cut_up(const std::vector<segment>& segments, const work_cursor::limits& within,
           std::uint64_t local_piece = 0, std::uint64_t remote_piece = 0) {
  cut made;
  work_cursor cursor{segments, local_base, remote_base, local_piece, remote_piece};
  const auto in_one_piece = [](std::uint64_t offset, std::uint64_t bytes, std::uint64_t piece) {
    return piece == 0 || offset / piece == (offset + bytes - 1) / piece;
  };
  while (!cursor.at_end()) {
    const auto from = cursor.segment_index();
    const auto run = cursor.next(within);
    ++made.requests;
    EXPECT_EQ(run.first_segment, from);
    EXPECT_GE(run.last_segment, run.first_segment);
    EXPECT_LE(run.bytes, within.bytes);
    EXPECT_LE(run.runs, within.runs);
    EXPECT_GT(run.bytes, 0U);
    EXPECT_TRUE(in_one_piece(run.address - remote_base, run.bytes, remote_piece));
    auto remote = run.address;
    std::uint64_t total = 0;
    for (std::uint32_t i = 0; i < run.runs; ++i) {
      EXPECT_TRUE(in_one_piece(run.local[i].address - local_base, run.local[i].bytes, local_piece));
      for (std::uint32_t b = 0; b < run.local[i].bytes; ++b) {
        made.twice += !made.all.emplace(remote++, run.local[i].address + b).second;
      }
      total += run.local[i].bytes;
    }
    EXPECT_EQ(total, run.bytes);
  }
  return made;
}

}  // namespace

TEST(work_cursor, contiguous_neighbours_share_a_request) {
  const std::vector<segment> segments{{0, 0, 100, 0, 0, 1}, {100, 100, 100, 0, 0, 1}};
  const auto made = cut_up(segments, {.bytes = 4096, .runs = 1});
  EXPECT_EQ(made.requests, 1U);
  EXPECT_EQ(made.all, naive(segments));
}

TEST(work_cursor, scattered_local_blocks_of_one_remote_run_share_a_request_as_far_as_runs_reach) {
  std::vector<segment> segments;
  for (std::uint64_t i = 0; i < 8; ++i) segments.push_back({i * 1000, i * 100, 100, 0, 0, 1});
  EXPECT_EQ(cut_up(segments, {.bytes = 4096, .runs = 8}).requests, 1U);
  EXPECT_EQ(cut_up(segments, {.bytes = 4096, .runs = 3}).requests, 3U);
  EXPECT_EQ(cut_up(segments, {.bytes = 4096, .runs = 1}).requests, 8U);
}

TEST(work_cursor, a_gap_on_the_remote_side_begins_another_request) {
  const std::vector<segment> segments{{0, 0, 10, 0, 0, 1}, {10, 11, 10, 0, 0, 1}};
  EXPECT_EQ(cut_up(segments, {.bytes = 4096, .runs = 16}).requests, 2U);
}

TEST(work_cursor, a_long_segment_goes_in_several_requests) {
  const std::vector<segment> segments{{0, 0, 10'001, 0, 0, 1}};
  const auto made = cut_up(segments, {.bytes = 1000, .runs = 1});
  EXPECT_EQ(made.requests, 11U);
  EXPECT_EQ(made.all, naive(segments));
}

TEST(work_cursor, no_request_crosses_the_border_of_a_piece) {
  const std::vector<segment> segments{{30, 50, 100, 0, 0, 1}, {130, 150, 100, 0, 0, 1}};
  // Remote 50..250 has a border at 200; local 30..230 has borders at 64, 128 and 192.
  const auto made = cut_up(segments, {.bytes = 4096, .runs = 16}, 64, 200);
  EXPECT_EQ(made.requests, 2U);
  EXPECT_EQ(made.all, naive(segments));
  EXPECT_EQ(cut_up(segments, {.bytes = 4096, .runs = 16}, 64, 0).requests, 1U);
  EXPECT_EQ(cut_up(segments, {.bytes = 4096, .runs = 1}, 64, 0).requests, 4U);
}

TEST(work_cursor, segments_of_nothing_are_nothing) {
  EXPECT_TRUE(work_cursor({}, 0, 0).at_end());
  const std::vector<segment> empty{{0, 0, 0, 0, 0, 1}, {5, 5, 0, 8, 8, 3}};
  EXPECT_TRUE(work_cursor(empty, 0, 0).at_end());
  const std::vector<segment> one{{0, 0, 0, 0, 0, 1}, {7, 9, 1, 0, 0, 1}, {5, 5, 0, 0, 0, 1}};
  EXPECT_EQ(cut_up(one, {.bytes = 10, .runs = 1}).all, naive(one));
}

TEST(work_cursor, whatever_the_segments_each_byte_is_moved_once_and_to_its_place) {
  std::mt19937 random{4711};
  const auto up_to = [&](std::uint64_t most) { return random() % (most + 1); };
  for (int round = 0; round < 300; ++round) {
    std::vector<segment> segments;
    std::uint64_t remote = 0;
    std::uint64_t local = 0;
    for (std::uint64_t i = 0, count = up_to(12); i < count; ++i) {
      segment s;
      s.length = up_to(60);
      s.count = static_cast<std::uint32_t>(1 + up_to(4));
      s.local_stride = s.length + (up_to(1) != 0 ? up_to(9) : 0);
      s.remote_stride = s.length + (up_to(1) != 0 ? up_to(9) : 0);
      s.local_offset = local += up_to(1) * up_to(20);
      s.remote_offset = remote += up_to(1) * up_to(20);
      local += s.count * s.local_stride;
      remote += s.count * s.remote_stride;
      segments.push_back(s);
    }
    const work_cursor::limits within{.bytes = static_cast<std::uint32_t>(1 + up_to(100)),
                                     .runs = static_cast<std::uint32_t>(1 + up_to(7))};
    const auto made = cut_up(segments, within, up_to(1) * up_to(50), up_to(1) * up_to(50));
    ASSERT_EQ(made.twice, 0U) << "round " << round;
    ASSERT_EQ(made.all, naive(segments)) << "round " << round;
  }
}

}  // namespace troupe::transport::rdma
