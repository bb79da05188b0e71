// Which nodes a carried request avoids afterwards, judging by the errors of its calls and the
// membership.

#include "troupe/actors/client/request_blame.hpp"

#include <gmock/gmock.h>

namespace troupe::actors {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr auto answered = call_reach::answered;
constexpr auto lost = call_reach::lost;
constexpr auto prefill = carried_side::prefill;
constexpr auto decode = carried_side::decode;

struct blame : ::testing::Test {
  placement where;
  membership seen;

  blame() {
    where.supervisor_incarnation = seen.supervisor_incarnation = 7;
    where.epoch = 5;
    seen.epoch = 9;
    for (const char* name : {"prefill-0", "decode-0", "decode-1"}) {
      member m;
      m.node.name = name;
      m.node.incarnation = seen.members.size() + 1;
      m.state = static_cast<std::uint8_t>(node_state::up);
      m.registered = 3;
      seen.members.push_back(m);
    }
    where.prefill = {seen.members[0].node};
    where.decode = {seen.members[1].node, seen.members[2].node};
  }
  void set(std::size_t node, node_state state) {
    seen.members[node].state = static_cast<std::uint8_t>(state);
  }
};

TEST_F(blame, falls_on_who_could_not_be_asked_any_more) {
  const auto verdict = judge(seen, where,
                             {{prefill, "prefill-0", answered, {errc::peer_lost, "decode is gone"}},
                              {decode, "decode-1", lost, {errc::peer_lost, "connection"}}});
  EXPECT_THAT(verdict.lost, ElementsAre("decode-1"));
  EXPECT_EQ(verdict.why.message, "connection");
}

TEST_F(blame, falls_on_whom_the_membership_shows_as_lost) {
  set(0, node_state::suspect);
  EXPECT_THAT(judge(seen, where, {{decode, "decode-0", answered, {errc::peer_lost, ""}}}).lost,
              ElementsAre("prefill-0"));
  // A stop in good order, and a deadline that passed because no peer was there.
  for (const auto code : {errc::aborted, errc::deadline}) {
    EXPECT_THAT(judge(seen, where, {{decode, "decode-0", answered, {code, ""}}}).lost,
                ElementsAre("prefill-0"));
  }
}

TEST_F(blame, falls_on_the_other_side_of_who_tells_of_a_loss_that_nobody_else_knows_of) {
  const auto verdict =
      judge(seen, where, {{decode, "decode-0", answered, {errc::link_broken, ""}}});
  EXPECT_THAT(verdict.lost, ElementsAre("prefill-0"));
  EXPECT_TRUE(verdict.guessed);
  EXPECT_THAT(
      judge(seen, where, {{prefill, "prefill-0", answered, {errc::lease_expired, ""}}}).lost,
      ElementsAre("decode-0", "decode-1"));
  set(0, node_state::suspect);
  EXPECT_FALSE(
      judge(seen, where, {{decode, "decode-0", answered, {errc::link_broken, ""}}}).guessed);
}

TEST_F(blame, falls_on_nobody_for_what_an_engine_answers_for_itself) {
  set(0, node_state::down);
  for (const auto code : {errc::pool_exhausted, errc::layout_mismatch, errc::internal}) {
    const auto verdict = judge(seen, where,
                               {{decode, "decode-0", answered, {errc::aborted, ""}},
                                {prefill, "prefill-0", answered, {code, "mine"}}});
    EXPECT_THAT(verdict.lost, IsEmpty());
    EXPECT_EQ(verdict.why.message, "mine");
  }
  set(0, node_state::up);
  for (const auto code : {errc::aborted, errc::deadline}) {
    EXPECT_THAT(judge(seen, where, {{decode, "decode-0", answered, {code, ""}}}).lost, IsEmpty());
  }
}

TEST_F(blame, knows_who_was_lost_by_state_life_and_epoch) {
  const auto& node = where.decode.front();
  EXPECT_FALSE(is_lost(seen, where, node));
  set(1, node_state::suspect);
  EXPECT_FALSE(is_lost(seen, where, node)) << "it may be heard again";
  set(1, node_state::down);
  seen.members[1].reason = "reports: no memory";
  EXPECT_FALSE(is_lost(seen, where, node)) << "it lives, and what it has begun goes on";
  seen.members[1].reason = "not heard for 5000 ms";
  EXPECT_TRUE(is_lost(seen, where, node));
  seen.epoch = 4;
  EXPECT_FALSE(is_lost(seen, where, node)) << "older than the placement";
  seen.epoch = 9;
  set(1, node_state::up);
  seen.members[1].registered = 6;
  EXPECT_TRUE(is_lost(seen, where, node)) << "it was out of the cluster since";
  seen.supervisor_incarnation = 8;
  EXPECT_FALSE(is_lost(seen, where, node)) << "another supervisor counts from elsewhere";
  seen.members[1].node.incarnation = 99;
  EXPECT_TRUE(is_lost(seen, where, node));
}

}  // namespace
}  // namespace troupe::actors
