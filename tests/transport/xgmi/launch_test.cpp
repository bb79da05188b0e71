#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "troupe/transport/xgmi/batch_launch.hpp"

#include "gpu_double.hpp"

// Tables and launches, on a GPU double.
namespace troupe::transport::xgmi {
namespace {

class launches : public ::testing::Test {
 protected:
  static constexpr std::uint64_t size = std::uint64_t{32} << 20;

  void SetUp() override {
    from = runtime.allocate(0, size).value();
    to = runtime.allocate(1, size).value();
    std::mt19937_64 random{1};
    for (std::uint64_t i = 0; i < size; i += 8) {
      const auto word = random();
      std::memcpy(from + i, &word, 8);
    }
    made = device_lanes::make(runtime, 0).value();
  }
  void TearDown() override {
    made.reset();
    runtime.release(0, from);
    runtime.release(1, to);
  }

  flight go(std::span<const segment> segments) {
    batch_launch::plan how;
    how.copy_blocks = 4;
    how.bulk = true;
    how.total = total_bytes(segments);
    how.segments = segments.size();
    batch_launch launch{*made, how};
    launch.add(direction::write, from, to, segments);
    auto flown = launch.end();
    EXPECT_FALSE(launch.failure());
    return flown;
  }
  void wait_for(flight& flown) const {
    while (!flown.ended()) {
      for (std::size_t i = 0; i < device_lanes::lane_count; ++i) made->lane(i).look();
    }
    flown.give_back_tables();
  }

  gpu_double runtime;
  std::byte* from{nullptr};
  std::byte* to{nullptr};
  std::unique_ptr<device_lanes> made;
};

std::vector<segment> blocks(std::uint32_t count, std::uint64_t length, std::uint64_t distance) {
  std::vector<segment> segments;
  for (std::uint32_t i = 0; i < count; ++i) {
    segments.push_back({i * distance, (count - 1 - i) * distance, length, 0, 0, 1});
  }
  return segments;
}

}  // namespace

TEST_F(launches, one_to_thousands_of_blocks_arrive_whatever_their_number) {
  for (const std::uint32_t count : {1U, 2U, 239U, 240U, 241U, 700U, 5000U, 30'000U}) {
    for (const std::uint64_t length : {std::uint64_t{512}, std::uint64_t{1001}}) {
      std::memset(to, 0, size);
      const auto segments = blocks(count, length, 1024);
      auto flown = go(segments);
      wait_for(flown);
      for (const auto& s : segments) {
        ASSERT_EQ(std::memcmp(to + s.remote_offset, from + s.local_offset, s.length), 0)
            << count << " blocks of " << length;
        ASSERT_EQ(to[s.remote_offset + s.length], std::byte{0});
      }
    }
  }
}

TEST_F(launches, a_few_blocks_travel_in_the_launch_and_take_no_table) {
  auto flown = go(blocks(max_inline_items, 1024, 1024));
  EXPECT_TRUE(flown.tables.empty());
  wait_for(flown);
  auto more = go(blocks(max_inline_items + 1, 1024, 1024));
  EXPECT_EQ(more.tables.size(), 1U);
  wait_for(more);
}

TEST_F(launches, tables_that_are_lent_are_bounded_and_come_back) {
  runtime.hold(true);
  std::vector<flight> under_way;
  while (!made->crowded()) {
    ASSERT_LT(under_way.size(), 2000U) << "nothing bounds them";
    under_way.push_back(go(blocks(20'000, 512, 1024)));
  }
  runtime.hold(false);
  for (auto& flown : under_way) wait_for(flown);
  EXPECT_FALSE(made->crowded());
}

TEST_F(launches, a_large_batch_is_launched_in_parts_on_both_lanes) {
  auto flown = go(blocks(30'000, 1024, 1024));
  EXPECT_NE(flown.marks[0], 0U);
  EXPECT_NE(flown.marks[1], 0U);
  wait_for(flown);
  EXPECT_EQ(runtime.launched(copy_way::bulk), 30'000U);
  auto few = go(blocks(64, 1024, 1024));
  wait_for(few);
  EXPECT_EQ(runtime.launched(copy_way::bulk), 30'000U) << "few bytes are not worth it";
  EXPECT_EQ(runtime.launched(copy_way::vector), 64U);
}

TEST_F(launches, a_lost_gpu_fails_what_flies_and_all_that_comes) {
  runtime.hold(true);
  auto flown = go(blocks(10, 1024, 1024));
  runtime.lose();
  runtime.hold(false);
  wait_for(flown);
  ASSERT_TRUE(flown.take_failure());
  EXPECT_EQ(flown.take_failure()->code, errc::backend_unavailable);
  batch_launch launch{*made, {.total = 1024, .segments = 1}};
  const auto one = blocks(1, 1024, 1024);
  launch.add(direction::write, from, to, one);
  auto late = launch.end();
  ASSERT_TRUE(launch.failure());
  EXPECT_TRUE(late.ended());
}

}  // namespace troupe::transport::xgmi
