// When a drained replica may leave, and how a node handles drain orders.

#include "troupe/actors/membership/drains.hpp"

#include <gmock/gmock.h>

#include "troupe/actors/membership/router.hpp"
#include "troupe/actors/operations/node_drain.hpp"

namespace troupe::actors {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;

/// A replica of two ranks that drains.
struct drain_of_a_replica : ::testing::Test {
  drain_list drains;
  steady_time now{std::chrono::hours{1}};
  std::size_t unfinished{0};
  static constexpr std::uint64_t drain_epoch{40};
  std::uint64_t seen{drain_epoch};  ///< the epoch that the ranks have seen

  void SetUp() override {
    drains.begin("decode", 0, {{"decode-0-0", 1}, {"decode-0-1", 2}}, milliseconds{30'000},
                 drain_epoch, now);
    (void)judge();
  }
  std::vector<drain_list::verdict> judge() {
    return drains.judge([this](std::string_view, std::uint32_t) { return unfinished; }, now);
  }
  void beat(const std::string& name, std::uint64_t incarnation, std::uint32_t queue = 0,
            std::uint32_t transfers = 0) {
    heartbeat h;
    h.name = name;
    h.incarnation = incarnation;
    h.epoch = seen;
    h.load.queue_length = queue;
    h.load.active_transfers = transfers;
    drains.heard(h);
  }
  /// Why the replica leaves. Empty if it does not leave yet.
  std::string leaves() {
    std::string why;
    for (const auto& verdict : judge()) {
      if (verdict.leave) why += verdict.reason;
    }
    return why;
  }
};

// Found by the simulated cluster, seed 8819: a supervisor that had been frozen read the drain order
// and old heartbeats at once.
TEST_F(drain_of_a_replica, does_not_leave_for_beats_that_were_sent_before_it_knew_of_the_drain) {
  seen = drain_epoch - 1;
  for (int i = 0; i < 5; ++i) {
    beat("decode-0-0", 1);
    beat("decode-0-1", 2);
  }
  EXPECT_EQ(leaves(), "");
  seen = drain_epoch;
  for (int i = 0; i < 2; ++i) {
    beat("decode-0-0", 1);
    beat("decode-0-1", 2);
  }
  EXPECT_EQ(leaves(), drained_reason);
}

TEST_F(drain_of_a_replica, leaves_when_two_beats_in_a_row_of_every_rank_told_of_nothing) {
  EXPECT_EQ(leaves(), "");
  beat("decode-0-0", 1);
  beat("decode-0-0", 1);
  EXPECT_EQ(leaves(), "") << "the other rank has said nothing";
  beat("decode-0-1", 2);
  EXPECT_EQ(leaves(), "");
  beat("decode-0-1", 2, 0, 1);
  EXPECT_EQ(leaves(), "");
  beat("decode-0-1", 2);
  EXPECT_EQ(leaves(), "") << "not in a row";
  beat("decode-0-1", 2);
  EXPECT_EQ(leaves(), drained_reason);
  EXPECT_TRUE(judge().empty()) << "once";
}

TEST_F(drain_of_a_replica, waits_for_what_is_placed_there_and_not_ended) {
  unfinished = 1;
  for (int i = 0; i < 5; ++i) {
    beat("decode-0-0", 1);
    beat("decode-0-1", 2);
    EXPECT_EQ(leaves(), "");
  }
  beat("decode-0-0", 1, 3);
  const auto said = judge();
  ASSERT_EQ(said.size(), 1u);
  EXPECT_EQ(said[0].ranks.size(), 2u);
  EXPECT_THAT(said[0].reason, HasSubstr("is drained within 30 s: 1 placed request whose end has "
                                        "not been reported, 3 in its queue"));
  unfinished = 0;
  for (int i = 0; i < 2; ++i) beat("decode-0-0", 1);
  EXPECT_EQ(leaves(), drained_reason);
}

TEST_F(drain_of_a_replica, leaves_at_the_deadline_and_says_what_is_still_live) {
  unfinished = 2;
  beat("decode-0-0", 1, 0, 1);
  now += milliseconds{29'999};
  EXPECT_EQ(leaves(), "");
  now += milliseconds{1};
  EXPECT_EQ(leaves(),
            "left when the drain's deadline of 30 s passed: 2 placed requests whose end has not "
            "been reported, 1 transfer");
}

TEST_F(drain_of_a_replica, a_rank_that_is_lost_is_waited_for_no_longer) {
  beat("decode-0-1", 2, 1, 1);
  beat("decode-0-0", 1);
  beat("decode-0-0", 1);
  EXPECT_EQ(leaves(), "");
  drains.lost("decode-0-1", 2);
  const auto said = judge();
  ASSERT_EQ(said.size(), 1u);
  EXPECT_TRUE(said[0].leave);
  ASSERT_EQ(said[0].ranks.size(), 1u);
  EXPECT_EQ(said[0].ranks[0].name, "decode-0-0");
}

TEST_F(drain_of_a_replica, a_life_that_registers_again_is_told_again_and_another_one_is_not) {
  const auto again = drains.registered("decode-0-0", 1);
  ASSERT_TRUE(again);
  EXPECT_EQ(again->incarnation, 1u);
  EXPECT_EQ(again->step, drain_step::finish);
  EXPECT_FALSE(drains.registered("prefill-0-0", 9));
  now += milliseconds{30'000};
  EXPECT_NE(leaves(), "");
  EXPECT_EQ(drains.registered("decode-0-0", 1)->step, drain_step::leave);
  EXPECT_FALSE(drains.registered("decode-0-0", 5)) << "a new life serves";
  EXPECT_FALSE(drains.registered("decode-0-0", 1));
  EXPECT_TRUE(drains.registered("decode-0-1", 2)) << "the other rank is still to leave";
}

TEST_F(drain_of_a_replica, a_former_life_neither_counts_nor_is_waited_for) {
  beat("decode-0-0", 7);
  beat("decode-0-0", 7);
  beat("decode-0-1", 2);
  beat("decode-0-1", 2);
  EXPECT_EQ(leaves(), "");
}

TEST_F(drain_of_a_replica, is_not_decided_while_no_rank_is_there_and_goes_on_with_the_same_life) {
  drains.lost("decode-0-0", 1);
  drains.lost("decode-0-1", 2);
  EXPECT_TRUE(judge().empty());
  const auto told = drains.registered("decode-0-0", 1);
  ASSERT_TRUE(told);
  EXPECT_EQ(told->step, drain_step::finish) << "two quiet heartbeats must say so first";
}

TEST_F(drain_of_a_replica, that_is_cancelled_is_judged_no_more_and_a_rank_that_was_away_is_told) {
  drains.lost("decode-0-1", 2);
  drains.cancel("decode", 0);
  beat("decode-0-0", 1);
  beat("decode-0-0", 1);
  now += milliseconds{60'000};
  EXPECT_TRUE(judge().empty());
  const auto told = drains.registered("decode-0-1", 2);
  ASSERT_TRUE(told);
  EXPECT_EQ(told->step, drain_step::resume);
  EXPECT_EQ(told->incarnation, 2u);
  EXPECT_FALSE(drains.registered("decode-0-1", 7)) << "another life knows of no drain";
}

TEST_F(drain_of_a_replica, that_is_cancelled_can_begin_again) {
  drains.cancel("decode", 0);
  drains.begin("decode", 0, {{"decode-0-0", 1}}, milliseconds{30'000}, drain_epoch, now);
  beat("decode-0-0", 1);
  beat("decode-0-0", 1);
  EXPECT_EQ(leaves(), drained_reason) << "the other rank is not drained now";
}

TEST_F(drain_of_a_replica, that_was_told_to_leave_is_not_cancelled) {
  now += milliseconds{60'000};
  EXPECT_NE(leaves(), "");
  drains.cancel("decode", 0);
  EXPECT_EQ(drains.registered("decode-0-0", 1)->step, drain_step::leave);
}

// -- what is placed on a replica

TEST(requests_of_a_replica, are_those_of_its_present_life_that_have_not_ended) {
  router_options options;
  options.edges = {{"prefill", "decode", transfer_mode::write}};
  options.slots = {{"prefill-0", "prefill", node_role::prefill, 0, 0, 1},
                   {"decode-0", "decode", node_role::decode, 0, 0, 1}};
  router routes{options};
  membership members;
  const auto show = [&](const std::string& name, std::uint64_t incarnation) {
    member m;
    m.node.name = name;
    m.node.incarnation = incarnation;
    m.state = static_cast<std::uint8_t>(node_state::up);
    std::erase_if(members.members, [&](const member& x) { return x.node.name == name; });
    members.members.push_back(m);
    routes.update(members, steady_time{std::chrono::hours{1}});
  };
  show("prefill-0", 1);
  show("decode-0", 2);
  const auto place = [&](const std::string& id) {
    EXPECT_TRUE(routes.place({id, "", "", 0, {}}, steady_time{}));
  };
  place("a");
  place("b");
  place("b");
  EXPECT_EQ(routes.unfinished("decode", 0), 2u);
  EXPECT_EQ(routes.unfinished("prefill", 0), 2u);
  routes.finished("a");
  EXPECT_EQ(routes.unfinished("decode", 0), 1u);
  EXPECT_EQ(routes.unfinished("decode", 9), 0u);
  EXPECT_EQ(routes.unfinished("nowhere", 0), 0u);
  show("decode-0", 3);
  EXPECT_EQ(routes.unfinished("decode", 0), 0u) << "its former life's";
  EXPECT_EQ(routes.unfinished("prefill", 0), 1u);
  place("c");
  EXPECT_EQ(routes.unfinished("decode", 0), 1u);
}

// -- a node

TEST(node_that_drains, heeds_orders_of_its_own_life_only) {
  node_drain drain;
  EXPECT_FALSE(drain.ordered({6, drain_step::leave}, 7));
  EXPECT_EQ(drain.standing(), drain_standing::serving);
  EXPECT_TRUE(drain.ordered({7, drain_step::finish}, 7));
  EXPECT_EQ(drain.standing(), drain_standing::draining);
  EXPECT_FALSE(drain.ordered({6, drain_step::leave}, 7));
  EXPECT_EQ(drain.standing(), drain_standing::draining);
  EXPECT_TRUE(drain.ordered({7, drain_step::leave}, 7));
  EXPECT_FALSE(drain.ordered({7, drain_step::finish}, 7)) << "an order that comes late";
  EXPECT_EQ(drain.standing(), drain_standing::drained);
}

TEST(node_that_drains, decides_by_itself_only_after_its_supervisor_forgot) {
  node_drain drain;
  load_report busy;
  busy.active_transfers = 1;
  drain.asks();
  EXPECT_FALSE(drain.registered()) << "a node that serves tells nobody that it leaves";
  (void)drain.ordered({7, drain_step::finish}, 7);
  for (int i = 0; i < 3; ++i) EXPECT_FALSE(drain.beats({}));
  drain.asks();
  (void)drain.ordered({7, drain_step::finish}, 7);
  EXPECT_FALSE(drain.registered()) << "it remembers";
  EXPECT_FALSE(drain.beats({}) || drain.beats({}));

  drain.asks();
  EXPECT_TRUE(drain.registered());
  EXPECT_FALSE(drain.beats({}) || drain.beats(busy) || drain.beats({}));
  EXPECT_EQ(drain.standing(), drain_standing::draining);
  EXPECT_TRUE(drain.beats({}));
  EXPECT_EQ(drain.standing(), drain_standing::drained);
}

TEST(node_that_drains, serves_on_when_that_is_ordered_and_not_once_it_is_drained) {
  node_drain drain;
  EXPECT_FALSE(drain.ordered({7, drain_step::resume}, 7)) << "it serves";
  (void)drain.ordered({7, drain_step::finish}, 7);
  EXPECT_FALSE(drain.ordered({6, drain_step::resume}, 7)) << "another life";
  EXPECT_TRUE(drain.ordered({7, drain_step::resume}, 7));
  EXPECT_EQ(drain.standing(), drain_standing::serving);
  drain.asks();
  EXPECT_FALSE(drain.registered()) << "there is no drain that a supervisor could have forgotten";
  EXPECT_FALSE(drain.beats({}) || drain.beats({}) || drain.beats({}));
  EXPECT_TRUE(drain.ordered({7, drain_step::finish}, 7)) << "and can be drained again";
  EXPECT_TRUE(drain.ordered({7, drain_step::leave}, 7));
  EXPECT_FALSE(drain.ordered({7, drain_step::resume}, 7));
  EXPECT_EQ(drain.standing(), drain_standing::drained);
}

}  // namespace
}  // namespace troupe::actors
