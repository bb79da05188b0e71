// Which placements and links a node refuses because the node that asks was out of the cluster.

#include "troupe/actors/membership/placement_epochs.hpp"

#include <gmock/gmock.h>

namespace troupe::actors {
namespace {

using ::testing::HasSubstr;

constexpr std::uint64_t supervisor = 7;
constexpr std::uint64_t other_supervisor = 8;
constexpr std::uint64_t life = 11;

membership seen_at(std::uint64_t epoch, node_state state, std::uint64_t registered,
                   std::string reason = {}) {
  membership seen;
  seen.supervisor_incarnation = supervisor;
  seen.epoch = epoch;
  member m;
  m.node.name = "decode-0";
  m.node.incarnation = life;
  m.state = static_cast<std::uint8_t>(state);
  m.registered = registered;
  m.reason = std::move(reason);
  seen.members.push_back(m);
  return seen;
}

TEST(a_placement, counts_while_its_node_has_been_in_the_cluster_since) {
  for (const auto state :
       {node_state::joining, node_state::up, node_state::suspect, node_state::leaving}) {
    EXPECT_FALSE(check_placement(seen_at(9, state, 3), "decode-0", life, {supervisor, 5}));
  }
  EXPECT_FALSE(check_placement(seen_at(9, node_state::up, 5), "decode-0", life, {supervisor, 5}))
      << "placed at the epoch of its registration";
  EXPECT_FALSE(check_placement(seen_at(9, node_state::up, 3), "unknown", 0, {supervisor, 5}));
}

TEST(a_placement, is_void_once_its_node_was_taken_in_after_it) {
  const auto why = check_placement(seen_at(9, node_state::up, 6), "decode-0", 0, {supervisor, 5});
  ASSERT_TRUE(why);
  EXPECT_EQ(why->code, errc::stale_incarnation);
  EXPECT_THAT(why->message, HasSubstr("at epoch 6"));
  EXPECT_THAT(why->message, HasSubstr("the placement of epoch 5"));
}

TEST(a_placement, is_void_while_its_node_is_down_but_not_by_older_news) {
  const auto why = check_placement(seen_at(9, node_state::down, 3, "not heard for 900 ms"),
                                   "decode-0", life, {supervisor, 5});
  ASSERT_TRUE(why);
  EXPECT_EQ(why->code, errc::stale_incarnation);
  EXPECT_THAT(why->message, HasSubstr("epoch 9 (not heard for 900 ms)"));
  EXPECT_FALSE(check_placement(seen_at(4, node_state::down, 3), "decode-0", life, {supervisor, 5}))
      << "it may have come back before it was placed there";
  EXPECT_FALSE(check_placement(seen_at(9, node_state::down, 3, "reports: no GPU"), "decode-0", life,
                               {supervisor, 5}))
      << "it lives: its transfers go on";
}

TEST(a_placement, of_another_supervisor_or_of_none_or_on_another_life_is_not_judged) {
  const auto seen = seen_at(9, node_state::up, 6);
  EXPECT_FALSE(check_placement(seen, "decode-0", 0, {other_supervisor, 5}));
  EXPECT_FALSE(check_placement(seen, "decode-0", 0, {0, 0}));
  EXPECT_FALSE(check_placement(seen, "decode-0", life + 1, {supervisor, 5}));
}

TEST(a_placement, is_judged_by_ones_own_registration_before_the_membership_tells_of_it) {
  node_info self;
  self.name = "decode-0";
  self.incarnation = life;
  const auto old = seen_at(4, node_state::up, 3);
  EXPECT_TRUE(check_own_placement(old, self, {supervisor, 8}, {supervisor, 5}));
  EXPECT_FALSE(check_own_placement(old, self, {supervisor, 8}, {supervisor, 8}));
  EXPECT_FALSE(check_own_placement(old, self, {other_supervisor, 8}, {supervisor, 5}));
  EXPECT_FALSE(check_own_placement(old, self, {supervisor, 8}, {0, 0}));
  // Registered again without having been down: the newer membership decides.
  EXPECT_FALSE(
      check_own_placement(seen_at(9, node_state::up, 3), self, {supervisor, 8}, {supervisor, 5}));
}

struct a_link_with_a_node : ::testing::Test {
  static link_request request(std::uint64_t registered, std::uint64_t by = supervisor) {
    link_request asks;
    asks.from.name = "decode-0";
    asks.from.incarnation = life;
    asks.supervisor_incarnation = by;
    asks.registered_epoch = registered;
    return asks;
  }
};

TEST_F(a_link_with_a_node, that_was_taken_for_dead_waits_until_it_has_registered_again) {
  const auto down = seen_at(9, node_state::down, 3, "not heard for 900 ms");
  const auto why = check_dialler(down, request(3));
  ASSERT_TRUE(why);
  EXPECT_EQ(why->code, errc::stale_incarnation);
  EXPECT_THAT(why->message, HasSubstr("for dead by epoch 9"));
  EXPECT_THAT(why->message, HasSubstr("register again"));
  EXPECT_FALSE(check_dialler(down, request(10))) << "it has";
}

TEST_F(a_link_with_a_node, that_is_there_or_known_to_another_supervisor_or_reports_its_failure) {
  EXPECT_FALSE(check_dialler(seen_at(9, node_state::up, 3), request(3)));
  EXPECT_FALSE(check_dialler(seen_at(9, node_state::suspect, 3), request(3)));
  EXPECT_FALSE(check_dialler(seen_at(9, node_state::down, 3), request(3, other_supervisor)));
  EXPECT_FALSE(check_dialler(seen_at(9, node_state::down, 3, "reports: no GPU"), request(3)));
}

}  // namespace
}  // namespace troupe::actors
