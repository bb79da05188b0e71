#include "troupe/kvcache/block_list.hpp"

#include <cstdint>
#include <optional>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "block_ids.hpp"

namespace troupe::kvcache {
namespace {

TEST(block_list, runs_name_the_same_blocks_in_the_same_order) {
  const auto blocks = ids({5, 6, 7, 3, 4, 4, 4'294'967'295U, 0, 1});
  const auto runs = runs_of(blocks);
  EXPECT_THAT(runs, testing::ElementsAre(block_run{{5}, 3}, block_run{{3}, 2}, block_run{{4}, 1},
                                         block_run{{4'294'967'295U}, 1}, block_run{{0}, 2}));
  EXPECT_EQ(count_blocks(runs), blocks.size());
  EXPECT_EQ(blocks_of(runs), blocks);
  EXPECT_TRUE(runs_of({}).empty());
}

TEST(block_list, a_list_that_begins_later_knows_its_blocks_by_their_number_in_the_request) {
  const auto blocks = ids({9, 4});
  const block_list list{blocks, 3};
  EXPECT_EQ(list.end(), 5U);
  EXPECT_EQ(list[3], block_id{9});
  EXPECT_EQ(list[4], block_id{4});
}

TEST(block_list, tokens_are_in_every_block_that_one_of_them_touches) {
  EXPECT_EQ(blocks_in({0, 0}, 16), 0U);
  EXPECT_EQ(blocks_in({5, 5}, 16), 0U);
  EXPECT_EQ(blocks_in({6, 5}, 16), 0U);
  EXPECT_EQ(blocks_in({0, 1}, 16), 1U);
  EXPECT_EQ(blocks_in({0, 16}, 16), 1U);
  EXPECT_EQ(blocks_in({0, 17}, 16), 2U);
  EXPECT_EQ(blocks_in({15, 17}, 16), 2U);
  EXPECT_EQ(blocks_in({16, 32}, 16), 1U);
  EXPECT_EQ(blocks_in({0, UINT64_MAX}, 1), UINT64_MAX);
  for (std::uint64_t size = 1; size <= 4; ++size) {
    for (std::uint64_t begin = 0; begin < 10; ++begin) {
      for (std::uint64_t end = begin; end < 10; ++end) {
        std::set<std::uint64_t> touched;
        for (auto token = begin; token < end; ++token) touched.insert(token / size);
        EXPECT_EQ(blocks_in({begin, end}, size), touched.size())
            << begin << " to " << end << " of " << size;
      }
    }
  }
}

TEST(block_list, a_block_that_is_named_twice_is_found_in_any_order) {
  EXPECT_EQ(repeated_block({}), std::nullopt);
  EXPECT_EQ(repeated_block(ids({7})), std::nullopt);
  EXPECT_EQ(repeated_block(ids({1, 2, 9})), std::nullopt);
  EXPECT_EQ(repeated_block(ids({9, 1, 2, 4'294'967'295U, 0})), std::nullopt);
  EXPECT_EQ(repeated_block(ids({1, 2, 2, 3})), block_id{2});
  EXPECT_EQ(repeated_block(ids({5, 1, 2, 5})), block_id{5});
}

}  // namespace
}  // namespace troupe::kvcache
