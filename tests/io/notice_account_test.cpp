#include "troupe/io/notice_account.hpp"

#include <gtest/gtest.h>

// How much of a peer's room is taken, from what the peer reports and what is in flight.
namespace troupe::io {

namespace {

constexpr std::size_t size = 10;

void hand_over(notice_account& to, int count) {
  for (int i = 0; i < count; ++i) {
    to.reserve(size);
    to.hand_over(size);
  }
}

taken count_of(std::uint64_t received, std::uint64_t read, std::uint64_t answers) {
  return {
      .received = {received, received * size}, .taken = {read, read * size}, .answers = answers};
}

notice_account with_room(std::uint64_t notices) {
  notice_account made;
  made.begin({.room = {notices, notices * size}, .received = {}, .taken = {}});
  return made;
}

}  // namespace

TEST(notice_account_test, a_full_room_is_free_again_when_the_peer_says_so) {
  auto account = with_room(3);
  hand_over(account, 3);
  EXPECT_FALSE(account.has_room_for(1));
  account.on_count(count_of(3, 1, 0));
  EXPECT_TRUE(account.has_room_for(size));
  EXPECT_FALSE(account.has_room_for(size + 1));
  account.reserve(size);
  EXPECT_FALSE(account.has_room_for(1));
  account.unreserve(size);
  EXPECT_TRUE(account.has_room_for(1));
}

TEST(notice_account_test, a_count_that_was_made_before_the_question_is_no_answer) {
  auto account = with_room(3);
  hand_over(account, 3);
  account.doubt();
  const auto asked = account.ask();
  ASSERT_TRUE(asked);
  account.on_count(count_of(0, 0, 0));  // this count was already in flight
  EXPECT_EQ(account.handed().notices, 3U);
  EXPECT_FALSE(account.has_room_for(1));
  EXPECT_FALSE(account.ask()) << "the question is open";
  account.on_count(count_of(2, 0, *asked));
  EXPECT_EQ(account.handed().notices, 2U);
  EXPECT_TRUE(account.has_room_for(size));
  EXPECT_FALSE(account.ask()) << "there is nothing in doubt any more";
}

TEST(notice_account_test, the_answer_to_a_former_question_is_none) {
  auto account = with_room(8);
  hand_over(account, 2);
  account.doubt();
  const auto first = account.ask();
  account.forget_question();
  hand_over(account, 1);
  const auto second = account.ask();
  ASSERT_TRUE(first && second);
  account.on_count(count_of(2, 0, *first));
  EXPECT_EQ(account.handed().notices, 3U);
  account.on_count(count_of(3, 0, *second));
  EXPECT_EQ(account.handed().notices, 3U);
}

TEST(notice_account_test, what_was_handed_over_since_the_question_still_counts) {
  auto account = with_room(8);
  hand_over(account, 2);
  account.doubt();
  const auto asked = account.ask();
  ASSERT_TRUE(asked);
  hand_over(account, 1);
  account.on_count(count_of(1, 0, *asked));
  EXPECT_EQ(account.handed().notices, 3U);
  EXPECT_TRUE(account.ask()) << "it is still in doubt";
}

TEST(notice_account_test, nobody_asks_while_a_batch_is_on_its_way) {
  auto account = with_room(8);
  hand_over(account, 1);
  account.batch_begins();
  account.doubt();
  EXPECT_FALSE(account.ask());
  account.batch_ends();
  EXPECT_TRUE(account.ask());
}

TEST(notice_account_test, a_question_whose_link_is_gone_is_asked_again) {
  auto account = with_room(3);
  hand_over(account, 3);
  account.doubt();
  ASSERT_TRUE(account.ask());
  EXPECT_FALSE(account.ask());
  account.forget_question();
  EXPECT_TRUE(account.ask());
}

TEST(notice_account_test, counts_that_overtake_each_other_take_nothing_back) {
  auto account = with_room(3);
  hand_over(account, 3);
  account.on_count(count_of(3, 3, 0));
  account.on_count(count_of(3, 1, 0));
  EXPECT_TRUE(account.has_room_for(3 * size));
}

TEST(notice_account_test, a_new_connection_begins_with_what_the_peer_says) {
  auto account = with_room(3);
  hand_over(account, 3);
  account.doubt();
  account.begin({.room = {3, 3 * size}, .received = {2, 2 * size}, .taken = {1, size}});
  EXPECT_EQ(account.handed().notices, 2U);
  EXPECT_TRUE(account.has_room_for(2 * size));
  EXPECT_FALSE(account.has_room_for(2 * size + 1));
  EXPECT_FALSE(account.ask());
}

TEST(notice_account_test, no_word_of_a_peer_makes_more_wait_here_than_may) {
  notice_account account{{3, 3 * size}};
  account.begin({.room = {UINT64_MAX, UINT64_MAX}, .received = {}, .taken = {}});
  account.on_count({.received = {}, .taken = {UINT64_MAX, UINT64_MAX}, .answers = 0});
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(account.has_room_for(size));
    account.reserve(size);
  }
  EXPECT_FALSE(account.has_room_for(0));
  account.hand_over(size);
  EXPECT_TRUE(account.has_room_for(size));
  EXPECT_FALSE(account.has_room_for(size + 1));
}

}  // namespace troupe::io
