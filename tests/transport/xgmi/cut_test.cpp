#include <map>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "troupe/transport/xgmi/cut_segments.hpp"

#include "sanitized.hpp"

// How a batch's segments are cut: each byte once, each item suited to the way that it is copied.
namespace troupe::transport::xgmi {
namespace {

struct run_of_bytes {
  std::uint64_t from;
  std::uint64_t to;
  std::uint64_t bytes;
};

struct listing {
  void run(copy_way way, std::uint64_t from, std::uint64_t to, std::uint64_t bytes) {
    // As it is packed for a GPU and read by it.
    const auto item = make_run_item(from, to, bytes);
    runs.emplace_back(
        way, run_of_bytes{item.from_and_low & item_address, item.to_and_high & item_address,
                          item.from_and_low >> item_address_bits |
                              item.to_and_high >> item_address_bits << 8});
  }
  void engine(std::uint64_t from, std::uint64_t to, std::uint64_t bytes) {
    engines.push_back({from, to, bytes});
  }
  void rows(const rows_item& item) { strided.push_back(item); }

  std::vector<std::pair<copy_way, run_of_bytes>> runs;
  std::vector<run_of_bytes> engines;
  std::vector<rows_item> strided;
};

/// destination byte -> source byte; fails on a byte that is moved twice.
std::map<std::uint64_t, std::uint64_t> moved_by(const listing& list) {
  std::map<std::uint64_t, std::uint64_t> moved;
  const auto add = [&](std::uint64_t from, std::uint64_t to, std::uint64_t bytes) {
    for (std::uint64_t i = 0; i < bytes; ++i) {
      EXPECT_TRUE(moved.emplace(to + i, from + i).second) << "byte " << to + i << " twice";
    }
  };
  for (const auto& [way, item] : list.runs) add(item.from, item.to, item.bytes);
  for (const auto& item : list.engines) add(item.from, item.to, item.bytes);
  for (const auto& item : list.strided) {
    for (std::uint32_t row = 0; row < item.rows; ++row) {
      add(item.from + row * item.from_stride, item.to + row * item.to_stride, item.length);
    }
  }
  return moved;
}

std::map<std::uint64_t, std::uint64_t> expected(std::uint64_t local, std::uint64_t remote,
                                                std::span<const segment> segments, direction dir) {
  std::map<std::uint64_t, std::uint64_t> moved;
  for (const auto& s : segments) {
    for (std::uint32_t i = 0; i < s.count; ++i) {
      for (std::uint64_t b = 0; b < s.length; ++b) {
        const auto here = local + s.local_offset + i * s.local_stride + b;
        const auto there = remote + s.remote_offset + i * s.remote_stride + b;
        moved.emplace(dir == direction::write ? there : here,
                      dir == direction::write ? here : there);
      }
    }
  }
  return moved;
}

void expect_fit(const cutting& how, const listing& list) {
  for (const auto& [way, item] : list.runs) {
    EXPECT_GT(item.bytes, 0U);
    EXPECT_LE(item.bytes, how.chunk);
    switch (way) {
      case copy_way::bulk: EXPECT_EQ((item.from | item.to | item.bytes) & 15, 0U); break;
      case copy_way::vector: EXPECT_EQ((item.from ^ item.to) & 15, 0U); break;
      case copy_way::unlike: EXPECT_NE((item.from ^ item.to) & 15, 0U); break;
      case copy_way::rows: ADD_FAILURE() << "a run is no row"; break;
    }
  }
  for (const auto& item : list.strided) {
    EXPECT_LE(std::uint64_t{item.length} * item.rows, how.chunk);
    EXPECT_GT(item.rows, 0U);
  }
}

}  // namespace

TEST(cut_segments, every_byte_goes_once_whatever_the_shape) {
  std::mt19937_64 random{7};
  const int rounds = troupe::testing::sanitized ? 30 : 300;
  for (int round = 0; round < rounds; ++round) {
    const cutting how{.chunk = 512U << random() % 4,
                      .engine_bytes = random() % 2 == 0 ? UINT64_MAX : 6000,
                      .bulk = random() % 2 == 0};
    std::vector<segment> segments;
    std::uint64_t local = 0;
    std::uint64_t remote = 0;
    for (std::uint64_t i = random() % 6; i != 0; --i) {
      segment s;
      s.local_offset = local + random() % 40;
      s.remote_offset = remote + random() % 40;
      s.length = random() % 3 == 0 ? random() % 9000 : random() % 300;
      if (random() % 3 == 0) {
        s.count = 1 + static_cast<std::uint32_t>(random() % 20);
        s.local_stride = s.length + random() % 2 * (random() % 64);
        s.remote_stride = s.length + random() % 2 * (random() % 64);
      }
      local = s.local_offset + s.count * (s.local_stride + s.length);
      remote = s.remote_offset + s.count * (s.remote_stride + s.length);
      segments.push_back(s);
    }
    const auto dir = random() % 2 == 0 ? direction::write : direction::read;
    const std::uint64_t here = 0x10'0000 + random() % 3 * 4;
    const std::uint64_t there = 0x90'0000 + random() % 3 * 8;
    listing list;
    cut_segments(how, dir, here, there, segments, list);
    expect_fit(how, list);
    ASSERT_EQ(moved_by(list), expected(here, there, segments, dir)) << "round " << round;
  }
}

TEST(cut_segments, repetitions_that_touch_are_one_run) {
  listing list;
  const std::vector<segment> touching{{0, 4096, 256, 256, 256, 8}};
  cut_segments({.chunk = 8192}, direction::write, 0, 1 << 20, touching, list);
  ASSERT_EQ(list.runs.size(), 1U);
  EXPECT_EQ(list.runs[0].second.bytes, 2048U);
}

TEST(cut_segments, a_head_slice_of_many_tokens_is_some_items_and_not_one_per_token) {
  listing list;
  const std::vector<segment> slice{{0, 0, 256, 1024, 512, 3200}};
  cut_segments({.chunk = 8192}, direction::write, 0, 1 << 24, slice, list);
  EXPECT_EQ(list.strided.size(), 100U);
  EXPECT_TRUE(list.runs.empty());
}

TEST(cut_segments, long_runs_go_by_the_engine_and_odd_ones_by_threads) {
  const std::vector<segment> two{{0, 0, 1 << 20, 0, 0, 1}, {1 << 21, 1 << 21, 8200, 0, 0, 1}};
  listing list;
  cut_segments({.chunk = 8192, .engine_bytes = 1 << 20, .bulk = true}, direction::read, 0, 1 << 24,
               two, list);
  ASSERT_EQ(list.engines.size(), 1U);
  EXPECT_EQ(list.engines[0].from, 1U << 24);
  ASSERT_EQ(list.runs.size(), 2U);
  EXPECT_EQ(list.runs[0].first, copy_way::bulk);
  EXPECT_EQ(list.runs[1].first, copy_way::vector) << "8 bytes are no bulk";
}

TEST(cut_segments, items_are_small_for_small_batches_and_never_too_many) {
  EXPECT_EQ(chunk_for(0), 1024U);
  EXPECT_EQ(chunk_for(64 << 10), 1024U);
  EXPECT_EQ(chunk_for(1 << 20), 4096U);
  EXPECT_EQ(chunk_for(8 << 20), 8192U);
  EXPECT_EQ(chunk_for(64 << 20), 16384U);
  for (std::uint64_t total = 1; total < std::uint64_t{1} << 40; total = total * 3 + 1) {
    EXPECT_EQ(chunk_for(total) % 512, 0U);
    EXPECT_LE(chunk_for(total), most_chunk);
    if (total <= std::uint64_t{32} << 30) {
      EXPECT_LE(total / chunk_for(total), 1U << 20) << total;
    }
  }
}

}  // namespace troupe::transport::xgmi
