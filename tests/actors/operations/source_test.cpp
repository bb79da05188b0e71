// How a source treats decode ranks that come, are lost and are replaced.

#include "troupe/actors/operations/source.hpp"

#include <gtest/gtest.h>

namespace troupe::actors {
namespace {

constexpr transfer_id first{1};
constexpr transfer_id second{2};
constexpr transfer_id third{3};
constexpr transfer_id fourth{4};

source for_consumers(std::uint32_t consumers) {
  send_spec spec;
  spec.request = "r";
  spec.consumers = consumers;
  return source{std::move(spec), 4, {}};
}

TEST(source, has_an_open_place_once_its_rank_is_lost_and_until_another_comes) {
  auto s = for_consumers(0);
  s.taken_by(first, {"decode-0", "", 0, 1});
  EXPECT_FALSE(s.has_open_place());
  s.lost_one(first);
  EXPECT_TRUE(s.has_open_place());
  s.taken_by(second, {"decode-0", "", 0, 1});
  EXPECT_FALSE(s.has_open_place());
  EXPECT_TRUE(s.released(second, 10));
  EXPECT_EQ(s.bytes(), 10u);
}

TEST(source, has_none_when_the_next_life_of_a_rank_came_before_the_end_of_the_former_was_known) {
  auto s = for_consumers(0);
  s.taken_by(first, {"decode-0", "", 0, 1});
  s.taken_by(second, {"decode-0", "", 0, 1});
  s.lost_one(first);
  EXPECT_FALSE(s.has_open_place());
  EXPECT_TRUE(s.released(second, 10));
}

TEST(source, of_two_ranks_keeps_a_place_open_until_both_are_replaced) {
  auto s = for_consumers(0);
  s.taken_by(first, {"decode-0-0", "", 0, 2});
  EXPECT_TRUE(s.has_open_place()) << "the other has not come";
  s.taken_by(second, {"decode-0-1", "", 1, 2});
  EXPECT_FALSE(s.has_open_place());
  s.lost_one(first);
  EXPECT_TRUE(s.has_open_place());
  s.lost_one(second);
  EXPECT_TRUE(s.has_open_place());
  s.taken_by(third, {"decode-1-0", "", 0, 2});
  EXPECT_TRUE(s.has_open_place());
  EXPECT_FALSE(s.released(third, 1));
  EXPECT_TRUE(s.has_open_place());
  s.taken_by(fourth, {"decode-1-1", "", 1, 2});
  EXPECT_FALSE(s.has_open_place());
  EXPECT_TRUE(s.released(fourth, 1));
}

TEST(source, is_not_done_with_ranks_of_two_replicas) {
  auto s = for_consumers(0);
  s.taken_by(first, {"decode-0-0", "", 0, 2});
  s.taken_by(second, {"decode-0-1", "", 1, 2});
  EXPECT_FALSE(s.released(first, 1));
  s.lost_one(second);
  s.taken_by(third, {"decode-1-1", "", 1, 2});
  EXPECT_TRUE(s.has_open_place()) << "rank 0 of that replica has not come";
  EXPECT_FALSE(s.released(third, 1)) << "one rank of each";
  EXPECT_TRUE(s.has_open_place());
  s.taken_by(fourth, {"decode-1-0", "", 0, 2});
  EXPECT_FALSE(s.has_open_place());
  EXPECT_TRUE(s.released(fourth, 1));
}

TEST(source, counts_the_ranks_of_the_replica_that_comes_in_the_place_of_a_smaller_one) {
  auto s = for_consumers(0);
  s.taken_by(first, {"decode-0", "", 0, 1});
  s.lost_one(first);
  s.taken_by(second, {"decode-1-0", "", 0, 2});
  EXPECT_FALSE(s.released(second, 1)) << "the other rank has not come";
  s.taken_by(third, {"decode-1-1", "", 1, 2});
  EXPECT_TRUE(s.released(third, 1));
}

TEST(source, is_done_with_the_one_rank_that_comes_in_the_place_of_two) {
  auto s = for_consumers(0);
  s.taken_by(first, {"decode-0-0", "", 0, 2});
  s.lost_one(first);
  s.taken_by(second, {"decode-1", "", 0, 1});
  EXPECT_FALSE(s.has_open_place());
  EXPECT_TRUE(s.released(second, 1));
}

TEST(source, nor_when_the_rank_that_was_lost_had_not_asked) {
  auto s = for_consumers(0);
  s.taken_by(first, {"decode-0-0", "", 0, 2});
  EXPECT_FALSE(s.released(first, 1));
  s.lost_unasked("decode-0-1", "");
  s.taken_by(third, {"decode-1-1", "", 1, 2});
  EXPECT_FALSE(s.released(third, 1));
  s.taken_by(fourth, {"decode-1-0", "", 0, 2});
  EXPECT_TRUE(s.released(fourth, 1));
}

TEST(source, is_done_when_the_next_life_of_the_lost_rank_has_what_its_replica_missed) {
  for (const bool asked : {true, false}) {
    auto s = for_consumers(0);
    s.taken_by(first, {"decode-0-0", "", 0, 2});
    if (asked) s.taken_by(second, {"decode-0-1", "", 1, 2});
    EXPECT_FALSE(s.released(first, 1));
    if (asked) {
      s.lost_one(second);
    } else {
      s.lost_unasked("decode-0-1", "");
    }
    EXPECT_TRUE(s.has_open_place());
    s.taken_by(third, {"decode-0-1", "", 1, 2});
    EXPECT_FALSE(s.has_open_place());
    EXPECT_TRUE(s.released(third, 1));
  }
}

TEST(source, knows_the_replicas_of_members_in_whatever_order_they_come_and_are_lost) {
  auto s = for_consumers(0);
  s.taken_by(first, {"decode-0-1", "decode/0", 1, 2});
  s.taken_by(second, {"decode-1-0", "decode/1", 0, 2});
  s.lost_unasked("decode-0-0", "decode/0");
  s.lost_one(first);
  s.taken_by(third, {"decode-1-1", "decode/1", 1, 2});
  EXPECT_FALSE(s.has_open_place());
  EXPECT_FALSE(s.released(second, 1));
  EXPECT_TRUE(s.released(third, 1));
}

// Seed 2054 of the engine fuzzer: two of three ranks came before the membership arrived, and
// failed.
TEST(source, is_done_with_ranks_that_came_before_the_membership_named_their_replica) {
  auto s = for_consumers(0);
  const auto nobody_knows = [](const std::string&) { return std::string{}; };
  const auto take = [&](std::uint64_t id, std::uint32_t rank) {
    s.learn_replicas(nobody_knows);
    s.taken_by(transfer_id{id}, {"decode-0-" + std::to_string(rank), "", rank, 3});
  };
  take(1, 0);
  s.lost_one(transfer_id{1});
  take(2, 1);
  s.lost_one(transfer_id{2});
  take(3, 0);
  take(4, 2);
  take(5, 1);
  EXPECT_FALSE(s.released(transfer_id{3}, 1));
  EXPECT_FALSE(s.released(transfer_id{4}, 1));
  s.learn_replicas([](const std::string&) { return std::string{"decode/0"}; });
  EXPECT_TRUE(s.released(transfer_id{5}, 1));
}

// Seed 13 of the engine fuzzer: one rank of each replica came before the membership arrived. Seeds
// 22000312 and 28000128: the send did not end.
TEST(source, counts_the_release_of_a_rank_whose_first_asking_had_not_ended_when_it_asked_again) {
  constexpr transfer_id fifth{5};
  auto s = for_consumers(0);
  s.taken_by(first, {"decode-0-0", "", 0, 3});
  s.taken_by(second, {"decode-0-1", "", 1, 3});
  s.lost_one(first);
  s.taken_by(third, {"decode-0-2", "", 2, 3});  // as far as is known, of another replica
  s.taken_by(fourth, {"decode-0-1", "", 1, 3});
  s.learn_replicas([](const std::string&) { return "decode-0"; });
  s.lost_one(second);
  s.taken_by(fifth, {"decode-0-0", "decode-0", 0, 3});
  EXPECT_FALSE(s.has_open_place());
  EXPECT_FALSE(s.released(third, 1));
  EXPECT_FALSE(s.released(fourth, 1));
  EXPECT_TRUE(s.released(fifth, 1));
}

TEST(source, counts_it_though_the_first_asking_comes_last) {
  auto s = for_consumers(0);
  s.taken_by(second, {"decode-0", "decode", 0, 1});
  s.taken_by(first, {"decode-0", "decode", 0, 1});
  s.lost_one(first);
  EXPECT_FALSE(s.has_open_place());
  EXPECT_TRUE(s.released(second, 1));
}

TEST(source, counts_it_though_the_first_asking_comes_when_the_second_is_released) {
  auto s = for_consumers(0);
  s.taken_by(second, {"decode-0-0", "", 0, 2, 7});
  EXPECT_FALSE(s.released(second, 1));
  s.taken_by(first, {"decode-0-0", "", 0, 2, 7});
  s.lost_one(first);
  s.taken_by(third, {"decode-0-1", "", 1, 2, 8});
  EXPECT_TRUE(s.released(third, 1));
}

TEST(source, serves_the_next_life_of_a_rank_that_had_released_it) {
  auto s = for_consumers(0);
  s.taken_by(first, {"decode-0-0", "", 0, 2, 7});
  EXPECT_FALSE(s.released(first, 1));
  s.taken_by(second, {"decode-0-0", "", 0, 2, 9});
  s.taken_by(third, {"decode-0-1", "", 1, 2});
  EXPECT_FALSE(s.released(third, 1)) << "the next life has nothing yet";
  EXPECT_TRUE(s.released(second, 1));
}

TEST(source, parts_ranks_of_two_replicas_that_were_taken_for_one) {
  auto s = for_consumers(4);
  const auto named = [](const std::string& node) { return "decode/" + node.substr(7, 1); };
  s.taken_by(transfer_id{1}, {"decode-0-0", "", 0, 2});
  s.taken_by(transfer_id{2}, {"decode-1-1", "", 1, 2});
  s.learn_replicas(named);
  s.taken_by(transfer_id{3}, {"decode-0-1", "decode/0", 1, 2});
  s.learn_replicas(named);
  s.taken_by(transfer_id{4}, {"decode-1-0", "decode/1", 0, 2});
  s.learn_replicas(named);
  for (std::uint64_t id = 1; id < 4; ++id) EXPECT_FALSE(s.released(transfer_id{id}, 1));
  EXPECT_TRUE(s.released(transfer_id{4}, 1));
}

// Seed 35: the membership named one of two replicas before the other.
TEST(source, takes_nobodys_place_for_a_rank_that_it_cannot_place_yet) {
  auto s = for_consumers(4);
  const auto named = [](const std::string& node) {
    return node[7] == '0' ? std::string{"decode/0"} : std::string{};
  };
  s.taken_by(transfer_id{1}, {"decode-1-0", "", 0, 2});
  s.taken_by(transfer_id{2}, {"decode-0-1", "decode/0", 1, 2});
  s.learn_replicas(named);
  s.taken_by(transfer_id{3}, {"decode-0-0", "decode/0", 0, 2});
  s.learn_replicas(named);
  s.taken_by(transfer_id{4}, {"decode-1-1", "", 1, 2});
  for (std::uint64_t id = 1; id < 4; ++id) EXPECT_FALSE(s.released(transfer_id{id}, 1));
  EXPECT_TRUE(s.released(transfer_id{4}, 1));
}

// Seeds 10 and 54: each rank failed and came again before the membership named any of them.
TEST(source, is_delivered_when_the_membership_names_the_ranks_behind_the_last_release) {
  auto s = for_consumers(0);
  EXPECT_FALSE(s.is_delivered());
  for (const std::uint64_t attempt : {0, 10}) {
    for (std::uint32_t rank = 0; rank < 3; ++rank) {
      const transfer_id sender{attempt + rank};
      s.taken_by(sender, {"decode-0-" + std::to_string(rank), "", rank, 3});
      if (attempt == 0) {
        s.lost_one(sender);
      } else {
        static_cast<void>(s.released(sender, 1));
      }
    }
  }
  s.learn_replicas([](const std::string&) { return std::string{"decode/0"}; });
  EXPECT_TRUE(s.is_delivered());
}

TEST(source, of_several_replicas_counts_those_that_are_whole) {
  auto s = for_consumers(4);
  s.taken_by(first, {"decode-0-0", "", 0, 2});
  s.taken_by(second, {"decode-0-1", "", 1, 2});
  EXPECT_FALSE(s.released(first, 1));
  s.lost_one(second);
  std::uint64_t id = 10;
  for (const auto* replica : {"decode-1-", "decode-2-"}) {
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
      const transfer_id sender{++id};
      s.taken_by(sender, {replica + std::to_string(rank), "", rank, 2});
      EXPECT_EQ(s.released(sender, 1), id == 14);
    }
  }
}

}  // namespace
}  // namespace troupe::actors
