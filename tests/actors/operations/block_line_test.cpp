// Operations that wait for blocks of a node's pool.

#include "troupe/actors/operations/block_line.hpp"

#include <chrono>

#include <gtest/gtest.h>

namespace troupe::actors {
namespace {

constexpr operation_id first{1}, second{2};
constexpr block_line::time_point now{std::chrono::hours{1}};
constexpr auto later = now + std::chrono::seconds{1};

TEST(block_line, serves_who_came_first_and_lets_the_next_wait) {
  cache_pool pool{4};
  block_line line{&pool};
  ASSERT_TRUE(line.wait(first, 3, later));
  ASSERT_TRUE(line.wait(second, 3, later));
  const auto served = line.serve(now);
  ASSERT_EQ(served.size(), 1U);
  EXPECT_EQ(served.front().operation, first);
  ASSERT_TRUE(served.front().blocks);
  EXPECT_EQ(served.front().blocks->blocks.size(), 3U);
  EXPECT_FALSE(line.empty());
  ASSERT_TRUE(pool.free(served.front().blocks->owner, served.front().blocks->blocks));
  const auto then = line.serve(now);
  ASSERT_EQ(then.size(), 1U);
  EXPECT_EQ(then.front().operation, second);
  EXPECT_TRUE(line.empty());
  // A waiter that was served may come again, and leave.
  ASSERT_TRUE(line.wait(first, 3, later));
  line.leave(first);
  EXPECT_TRUE(line.empty());
}

TEST(block_line, tells_who_waited_in_vain) {
  cache_pool pool{1};
  block_line line{&pool};
  ASSERT_TRUE(pool.allocate(1));
  ASSERT_TRUE(line.wait(first, 1, later));
  EXPECT_TRUE(line.serve(now).empty());
  const auto served = line.serve(later);
  ASSERT_EQ(served.size(), 1U);
  ASSERT_FALSE(served.front().blocks);
  EXPECT_EQ(served.front().blocks.error().code, errc::deadline);
  EXPECT_TRUE(line.empty());
}

TEST(block_line, gives_nothing_to_who_has_left) {
  cache_pool pool{1};
  block_line line{&pool};
  ASSERT_TRUE(line.wait(first, 1, later));
  line.leave(first);
  line.leave(second);
  EXPECT_TRUE(line.empty());
  EXPECT_EQ(pool.counters().waiters, 0U);
  EXPECT_TRUE(line.serve(now).empty());
  EXPECT_EQ(pool.counters().free, 1U);
}

TEST(block_line, without_a_pool_says_so) {
  block_line line{nullptr};
  const auto waits = line.wait(first, 1, later);
  ASSERT_FALSE(waits);
  EXPECT_EQ(waits.error().code, errc::invalid_config);
  EXPECT_TRUE(line.serve(now).empty());
}

}  // namespace
}  // namespace troupe::actors
