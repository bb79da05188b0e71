#include <optional>
#include <vector>

#include <gtest/gtest.h>

#include "troupe/kvcache/block_pool.hpp"

#include "starving.hpp"

// A pool whose allocations fail: it loses no block and forgets no waiter.

namespace troupe::kvcache {
namespace {

using troupe::testing::allocations;
using troupe::testing::starve;

constexpr std::uint32_t total = 16;

block_pool::time_point at(int seconds) {
  return block_pool::time_point{} + std::chrono::seconds{seconds};
}

/// Every second block, so that each is a run by itself.
std::vector<block_id> every_second(const allocation& of) {
  std::vector<block_id> some;
  for (std::size_t i = 0; i < of.blocks.size(); i += 2) some.push_back(of.blocks[i]);
  return some;
}

TEST(starved_pool, blocks_that_could_not_be_taken_are_free) {
  block_pool pool{total};
  std::optional<result<allocation>> taken;
  starve([&] { taken = pool.allocate(total / 2); },
         [&] { EXPECT_EQ(pool.counters().free, total); });
  ASSERT_TRUE(taken && *taken);
  EXPECT_TRUE(pool.allocate(total / 2)) << "the other half";
}

TEST(starved_pool, blocks_are_given_back_with_what_memory_there_is) {
  block_pool pool{total};
  const auto all = pool.allocate(total).value();
  const auto some = every_second(all);
  std::optional<result<release_count>> freed;
  starve([&] { freed = pool.free(all.owner, some); },
         [&] { EXPECT_EQ(pool.counters().free, 0U) << "freed whole or not at all"; });
  ASSERT_TRUE(freed && *freed);
  EXPECT_EQ(pool.counters().free, some.size());
  const auto again = pool.allocate(static_cast<std::uint32_t>(some.size()));
  ASSERT_TRUE(again) << to_string(again.error());
  EXPECT_EQ(again->blocks.size(), some.size());
}

TEST(starved_pool, pins_end_without_memory_for_the_blocks_behind_them) {
  block_pool pool{total};
  const auto all = pool.allocate(total).value();
  const auto some = every_second(all);
  ASSERT_TRUE(pool.pin(all.owner, some));
  ASSERT_TRUE(pool.free(all.owner, all.blocks));
  std::optional<result<release_count>> unpinned;
  starve([&] { unpinned = pool.unpin(all.owner, some); },
         [&] { EXPECT_EQ(pool.counters().pinned, some.size()); });
  ASSERT_TRUE(unpinned && *unpinned);
  EXPECT_EQ(pool.counters().free, total);
  EXPECT_TRUE(pool.allocate(total));
}

TEST(starved_pool, blocks_that_are_named_beside_a_strangers_keep_their_references_and_pins) {
  block_pool pool{total};
  const auto mine = pool.allocate(total / 2).value();
  const auto other = pool.allocate(total / 2).value();
  ASSERT_TRUE(pool.pin(mine.owner, mine.blocks));
  auto both = mine.blocks;
  both.push_back(other.blocks.front());
  std::optional<result<release_count>> refused;
  starve([&] { refused = pool.unpin(mine.owner, both); },
         [&] { EXPECT_EQ(pool.counters().pinned, total / 2); });
  ASSERT_TRUE(refused && !*refused);
  ASSERT_TRUE(pool.unpin(mine.owner, mine.blocks));
  starve([&] { refused = pool.free(mine.owner, both); }, [] {});
  ASSERT_TRUE(refused && !*refused);
  EXPECT_TRUE(pool.free(mine.owner, mine.blocks));
  EXPECT_EQ(pool.counters().free, total / 2);
}

TEST(starved_pool, whoever_waits_has_a_deadline_and_is_served_once) {
  block_pool pool{total};
  const auto all = pool.allocate(total).value();
  std::optional<result<waiter_id>> first;
  starve([&] { first = pool.wait(4, at(1)); },
         [&] {
           EXPECT_EQ(pool.counters().waiters, 0U);
           EXPECT_FALSE(pool.next_deadline());
         });
  ASSERT_TRUE(first && *first);
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(pool.wait(4, at(9)));

  std::vector<served_waiter> served;
  const auto serve = [&](int now) {
    starve(
        [&] {
          for (auto& one : pool.serve(at(now))) {
            const auto kept = std::exchange(allocations.left, std::nullopt);
            served.push_back(std::move(one));
            allocations.left = kept;
          }
        },
        [] {});
  };
  serve(2);
  ASSERT_EQ(served.size(), 1U);
  EXPECT_EQ(served.front().outcome.error().code, errc::deadline);
  ASSERT_TRUE(pool.free(all.owner, all.blocks));
  // The call that ran out of memory has served some waiters, and the next one goes on.
  while (pool.counters().waiters != 0) serve(2);
  ASSERT_EQ(served.size(), 4U);
  std::size_t blocks = 0;
  for (std::size_t i = 1; i < served.size(); ++i) blocks += served[i].outcome.value().blocks.size();
  EXPECT_EQ(blocks, 12U);
  EXPECT_EQ(pool.counters().free, total - blocks);
}

}  // namespace
}  // namespace troupe::kvcache
