// What a source makes of decode ranks that come, are lost and are replaced.

#include "troupe/actors/source.hpp"

#include <gtest/gtest.h>

namespace troupe::actors {
namespace {

constexpr transfer_id first{1};
constexpr transfer_id second{2};
constexpr transfer_id third{3};

source for_consumers(std::uint32_t consumers) {
  send_spec spec;
  spec.request = "r";
  spec.consumers = consumers;
  return source{std::move(spec), 4, {}};
}

TEST(source, has_an_open_place_once_its_rank_is_lost_and_until_another_comes) {
  auto s = for_consumers(0);
  s.taken_by(first, 1);
  EXPECT_FALSE(s.has_open_place());
  EXPECT_TRUE(s.lost_one(first));
  s.taken_by(second, 1);
  EXPECT_FALSE(s.has_open_place());
  EXPECT_TRUE(s.released(second, 10));
  EXPECT_EQ(s.bytes(), 10u);
}

TEST(source, has_none_when_the_next_life_of_a_rank_came_before_the_end_of_the_former_was_known) {
  auto s = for_consumers(0);
  s.taken_by(first, 1);
  s.taken_by(second, 1);
  EXPECT_FALSE(s.lost_one(first));
  EXPECT_TRUE(s.released(second, 10));
}

TEST(source, of_two_ranks_keeps_a_place_open_until_both_are_replaced) {
  auto s = for_consumers(0);
  s.taken_by(first, 2);
  EXPECT_TRUE(s.has_open_place()) << "the other has not come";
  s.taken_by(second, 2);
  EXPECT_FALSE(s.has_open_place());
  EXPECT_TRUE(s.lost_one(first));
  EXPECT_TRUE(s.lost_one(second));
  s.taken_by(third, 2);
  EXPECT_TRUE(s.has_open_place());
  EXPECT_FALSE(s.released(third, 1));
  EXPECT_TRUE(s.has_open_place());
  s.taken_by(transfer_id{4}, 2);
  EXPECT_FALSE(s.has_open_place());
  EXPECT_TRUE(s.released(transfer_id{4}, 1));
}

}  // namespace
}  // namespace troupe::actors
