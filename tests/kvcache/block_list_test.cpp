#include "troupe/kvcache/block_list.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace troupe::kvcache {
namespace {

std::vector<block_id> ids(std::initializer_list<std::uint32_t> numbers) {
  std::vector<block_id> all;
  for (const auto n : numbers) all.push_back({n});
  return all;
}

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

}  // namespace
}  // namespace troupe::kvcache
