// Failures that nodes report themselves, and the state that a table inherits from a former
// supervisor.

#include <gmock/gmock.h>

#include "troupe/actors/base/broadcast_budget.hpp"
#include "troupe/actors/membership/membership.hpp"
#include "troupe/actors/messages/member_list.hpp"

#include "clocked_membership.hpp"

namespace troupe::actors {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;

using testing::clocked_membership;
using testing::life_1;
using testing::life_2;
using testing::life_3;
using testing::request_of;

membership_options decodes(std::uint32_t count) {
  membership_options o;
  o.cluster = "demo";
  o.supervisor_incarnation = 7;
  for (std::uint32_t i = 0; i < count; ++i)
    o.slots.push_back({"decode-" + std::to_string(i), "decode", node_role::decode, i, 0, 1});
  return o;
}

struct survival : clocked_membership {
  survival() : clocked_membership{decodes(2)} {}

  heartbeat_verdict beat(const std::string& name, std::uint64_t life,
                         const std::string& failure = {}) {
    return table.heard({name, life, ++sequence, {}, failure}, now);
  }
  void bring_up(const std::string& name, std::uint64_t life) {
    ASSERT_TRUE(join(name, life));
    ASSERT_EQ(beat(name, life), heartbeat_verdict::known);
    ASSERT_EQ(table.state_of(name), node_state::up);
  }
  member shown(const std::string& name) const {
    for (auto& m : table.view().members) {
      if (m.node.name == name) return m;
    }
    return {};
  }
  /// A new supervisor takes over from the saved state.
  void restart() {
    const auto left = table.record();
    table = membership_table{deployment};
    now += milliseconds{700};
    table.restore(left, now);
  }
};

// -- reports

TEST_F(survival, a_node_that_reports_a_failure_is_down_with_its_reason_whatever_it_says_later) {
  bring_up("decode-0", life_1);
  EXPECT_EQ(beat("decode-0", life_1, "GPU 3 fell off the bus"), heartbeat_verdict::known);
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(table.state_of("decode-0"), node_state::down);
    EXPECT_EQ(shown("decode-0").reason, "reports: GPU 3 fell off the bus");
    EXPECT_TRUE(reports_failure(shown("decode-0")));
    pass(milliseconds{1000});
    EXPECT_EQ(beat("decode-0", life_1), heartbeat_verdict::known) << "it must not register again";
  }
}

TEST_F(survival, a_reported_failure_ends_when_the_same_life_registers_again) {
  bring_up("decode-0", life_1);
  const auto registered = shown("decode-0").registered;
  (void)beat("decode-0", life_1, "no memory");
  bring_up("decode-0", life_1);
  EXPECT_EQ(shown("decode-0").reason, "first heartbeat");
  EXPECT_FALSE(table.reports_failure("decode-0"));
  EXPECT_EQ(shown("decode-0").registered, registered) << "it was not out of the cluster";
  // A node that falls silent while it is down by its own report is lost: placements there are void.
  (void)beat("decode-0", life_1, "no memory");
  pass(milliseconds{6000});
  bring_up("decode-0", life_1);
  EXPECT_GT(shown("decode-0").registered, registered);
}

TEST_F(survival, another_life_takes_the_place_of_one_that_reports_a_failure) {
  bring_up("decode-0", life_1);
  (void)beat("decode-0", life_1, "no memory");
  ASSERT_TRUE(join("decode-0", life_2, 5001));
  EXPECT_EQ(beat("decode-0", life_2), heartbeat_verdict::known);
  EXPECT_EQ(table.state_of("decode-0"), node_state::up);
  EXPECT_EQ(beat("decode-0", life_1, "no memory"), heartbeat_verdict::stale);
}

TEST_F(survival, a_node_that_registers_with_its_failure_never_is_up) {
  ASSERT_TRUE(join("decode-0", life_1));
  EXPECT_EQ(beat("decode-0", life_1, "no memory"), heartbeat_verdict::known);
  EXPECT_EQ(table.state_of("decode-0"), node_state::down);
  for (const auto& change : table.take_transitions()) EXPECT_NE(change.to, node_state::up);
}

TEST_F(survival, a_failed_node_that_falls_silent_is_lost_like_any_other) {
  bring_up("decode-0", life_1);
  (void)beat("decode-0", life_1, "no memory");
  pass(milliseconds{6000});
  EXPECT_THAT(shown("decode-0").reason, HasSubstr("not heard for"));
  EXPECT_FALSE(reports_failure(shown("decode-0")));
  EXPECT_EQ(beat("decode-0", life_1), heartbeat_verdict::unknown);
}

TEST_F(survival, a_failed_node_whose_connection_breaks_is_lost_and_one_that_leaves_has_left) {
  bring_up("decode-0", life_1);
  bring_up("decode-1", life_2);
  (void)beat("decode-0", life_1, "no memory");
  (void)beat("decode-1", life_2, "no memory");
  EXPECT_TRUE(table.connection_lost("decode-0", life_1, "closed", now));
  EXPECT_EQ(shown("decode-0").reason, "connection lost: closed");
  EXPECT_TRUE(table.leave("decode-1", life_2, now));
  EXPECT_TRUE(table.connection_lost("decode-1", life_2, "closed", now));
  EXPECT_EQ(shown("decode-1").reason, "left");
}

TEST_F(survival, a_reason_is_cut_and_made_printable) {
  bring_up("decode-0", life_1);
  (void)beat("decode-0", life_1, "bad\n\x1b[31m" + std::string(100'000, 'x'));
  const auto reason = shown("decode-0").reason;
  EXPECT_LT(reason.size(), 250u);
  for (const char c : reason) EXPECT_TRUE(c >= ' ' && c <= '~');
  const auto epoch = table.epoch();
  (void)beat("decode-0", life_1, "bad\n\x1b[31m" + std::string(100'000, 'x'));
  EXPECT_EQ(table.epoch(), epoch) << "the same failure said again is no change";
}

TEST_F(survival, every_member_says_why_it_is_in_its_state) {
  bring_up("decode-0", life_1);
  EXPECT_EQ(shown("decode-0").reason, "first heartbeat");
  table.connection_lost("decode-0", life_1, "closed", now);
  EXPECT_EQ(shown("decode-0").reason, "connection lost: closed");
}

TEST_F(survival, a_node_that_never_was_up_is_not_dropped_but_times_out_of_joining) {
  ASSERT_TRUE(join("decode-0", life_1));
  pass(milliseconds{4900});
  EXPECT_EQ(table.state_of("decode-0"), node_state::joining);
  pass(milliseconds{200});
  EXPECT_EQ(table.state_of("decode-0"), node_state::down);
  EXPECT_EQ(shown("decode-0").node.incarnation, life_1) << "and is still in the list";
}

TEST_F(survival, new_loads_are_published_once_per_heartbeat_interval_under_the_same_epoch) {
  bring_up("decode-0", life_1);
  ASSERT_TRUE(table.take_broadcast(now));
  heartbeat busy{"decode-0", life_1, ++sequence, {}, {}};
  busy.load.queue_length = 5;
  busy.load.links_broken = 1;
  ASSERT_EQ(table.heard(busy, now), heartbeat_verdict::known);
  EXPECT_FALSE(table.take_broadcast(now + milliseconds{999}));
  const auto list = table.take_broadcast(now + milliseconds{1000});
  ASSERT_TRUE(list);
  EXPECT_EQ(list->epoch, table.epoch());
  EXPECT_EQ(list->members[0].load.queue_length, 5u);
  EXPECT_EQ(list->members[0].load.links_broken, 1u);
  ++busy.sequence;
  ASSERT_EQ(table.heard(busy, now), heartbeat_verdict::known);
  EXPECT_FALSE(table.take_broadcast(now + milliseconds{9000})) << "the same load is no news";
}

TEST(loads, of_large_clusters_are_published_less_often_and_states_are_not) {
  const auto options = decodes(1000);
  membership_table table{options};
  steady_time now{std::chrono::hours{1}};
  ASSERT_TRUE(table.registered(request_of(options, "decode-0", life_1), now));
  ASSERT_TRUE(table.take_broadcast(now));
  heartbeat busy{"decode-0", life_1, 1, {}, {}};
  busy.load.queue_length = 5;
  ASSERT_EQ(table.heard(busy, now), heartbeat_verdict::known);
  EXPECT_TRUE(table.take_broadcast(now + milliseconds{100})) << "it is up now";
  busy.sequence = 2;
  busy.load.queue_length = 6;
  ASSERT_EQ(table.heard(busy, now), heartbeat_verdict::known);
  // A thousand lists of a thousand nodes: the budget allows one such round in 50 s.
  EXPECT_FALSE(table.take_broadcast(now + std::chrono::seconds{50}));
  EXPECT_TRUE(table.take_broadcast(now + std::chrono::seconds{51}));
}

// Each list of n nodes goes to n nodes, and the network layer accepts any amount: lists that are
// sent faster than they can be transferred pile up there and delay heartbeats.
TEST(changes, of_a_thousand_nodes_that_register_at_once_are_told_in_so_many_entries_as_can_go_out) {
  const auto options = decodes(1000);
  membership_table table{options};
  const steady_time start{std::chrono::hours{1}};
  steady_time now = start;
  std::uint64_t entries = 0;
  const auto tell = [&] {
    if (const auto list = table.take_broadcast(now)) {
      entries += list->members.size() * list->members.size();
    }
  };
  for (std::uint32_t i = 0; i < 1000; ++i, now += milliseconds{1}) {
    const auto name = "decode-" + std::to_string(i);
    ASSERT_TRUE(table.registered(request_of(options, name, life_1), now));
    tell();
    ASSERT_EQ(table.heard({name, life_1, 1, {}, {}, 0}, now), heartbeat_verdict::known);
    tell();
  }
  for (; now < start + std::chrono::seconds{10}; now += milliseconds{50}) tell();
  EXPECT_LT(entries, 3'000'000u);
  EXPECT_FALSE(table.take_broadcast(now)) << "everything is told by now";
  // A single change after that is published at once.
  ASSERT_TRUE(table.connection_lost("decode-7", life_1, "killed", now));
  EXPECT_TRUE(table.take_broadcast(now));
}

TEST(broadcast_budget, lets_a_list_of_a_thousand_go_to_25_nodes_at_once_and_to_500_in_a_second) {
  broadcast_budget pace;
  steady_time now{std::chrono::hours{1}};
  const auto told = [&] {
    int count = 0;
    for (; pace.has_room(now); ++count) pace.tells(1000);
    return count;
  };
  EXPECT_EQ(told(), 25);
  now += std::chrono::seconds{60};
  EXPECT_EQ(told(), 25) << "what was not used is not saved up";
  int in_a_second = 0;
  for (int tick = 0; tick < 20; ++tick) {
    now += milliseconds{50};
    in_a_second += told();
  }
  EXPECT_NEAR(in_a_second, 500, 2);
  now -= std::chrono::seconds{5};
  EXPECT_EQ(told(), 0);
}

TEST(broadcast_budget, begins_no_list_with_those_whom_the_last_one_has_reached) {
  const std::set<std::string> everybody{"a", "b", "c", "d", "e"};
  std::string told_last;
  std::string told;
  for (int list = 0; list < 5; ++list) {
    auto waiting = everybody;  // each list replaces the one before, which was half sent
    for (int i = 0; i < 2; ++i) told += told_last = take_next(waiting, told_last);
    EXPECT_EQ(waiting.size(), 3u);
  }
  EXPECT_EQ(told, "abcdeabcde");
  std::set<std::string> gone{"b"};
  EXPECT_EQ(take_next(gone, "x"), "b") << "whoever was told last is there no more";
  EXPECT_TRUE(gone.empty());
}

TEST(changes, wait_for_half_as_long_again_as_the_list_before_them_takes_to_be_sent) {
  constexpr int nodes = 400;
  const auto options = decodes(nodes);
  membership_table table{options};
  steady_time now{std::chrono::hours{1}};
  for (const auto& slot : options.slots)
    ASSERT_TRUE(table.registered(request_of(options, slot.name, life_1), now));
  ASSERT_TRUE(table.take_broadcast(now));
  ASSERT_TRUE(table.connection_lost("decode-7", life_1, "killed", now));
  now += milliseconds{nodes * nodes / 500 * 3 / 2 - 1};
  EXPECT_FALSE(table.take_broadcast(now));
  now += milliseconds{1};
  EXPECT_TRUE(table.take_broadcast(now));
}

TEST_F(survival, the_reason_of_a_lost_connection_is_bounded_whatever_the_peer_called_it) {
  bring_up("decode-0", life_1);
  ASSERT_TRUE(table.connection_lost("decode-0", life_1, std::string(1u << 20, '\n'), now));
  EXPECT_LT(shown("decode-0").reason.size(), 300u);
  EXPECT_THAT(shown("decode-0").reason, ::testing::Not(HasSubstr("\n")));
}

// -- restart

TEST_F(survival, a_restarted_supervisor_shows_those_that_were_there_as_joining_and_asks_them_back) {
  bring_up("decode-1", life_1);
  const auto before = table.epoch();
  restart();
  EXPECT_GT(table.epoch(), before);
  EXPECT_EQ(table.state_of("decode-1"), node_state::joining);
  EXPECT_EQ(shown("decode-1").node.replica, 1u);
  EXPECT_EQ(shown("decode-1").node.port, 5000);
  EXPECT_EQ(beat("decode-1", life_1), heartbeat_verdict::unknown) << "it must register first";
  EXPECT_EQ(table.state_of("decode-1"), node_state::joining);
  bring_up("decode-1", life_1);
  EXPECT_EQ(table.state_of("decode-0"), std::nullopt) << "it never registered";
}

TEST_F(survival, a_life_that_does_not_come_back_is_down_after_the_timeout) {
  bring_up("decode-0", life_1);
  restart();
  pass(milliseconds{4900});
  EXPECT_EQ(table.state_of("decode-0"), node_state::joining);
  pass(milliseconds{200});
  EXPECT_EQ(table.state_of("decode-0"), node_state::down);
}

TEST_F(survival, a_replaced_life_stays_refused_after_every_restart) {
  bring_up("decode-0", life_1);
  ASSERT_TRUE(join("decode-0", life_2));
  for (int i = 0; i < 3; ++i) {
    restart();
    const auto refused = join("decode-0", life_1, 6000);
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code, errc::stale_incarnation);
    EXPECT_EQ(beat("decode-0", life_1), heartbeat_verdict::stale);
  }
  bring_up("decode-0", life_2);
}

TEST_F(survival,
       a_life_that_began_while_there_was_no_supervisor_replaces_the_remembered_one_at_once) {
  bring_up("decode-0", life_1);
  restart();
  ASSERT_TRUE(join("decode-0", life_2, 6000)) << "nobody knows whether the former one lives";
  const auto refused = join("decode-0", life_1);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, errc::stale_incarnation);
}

TEST_F(survival, a_node_that_was_down_is_not_shown_and_may_return_or_be_replaced) {
  bring_up("decode-0", life_1);
  bring_up("decode-1", life_2);
  table.connection_lost("decode-0", life_1, "closed", now);
  table.connection_lost("decode-1", life_2, "closed", now);
  restart();
  EXPECT_TRUE(table.view().members.empty()) << "shown as down it would lose its links";
  bring_up("decode-0", life_1);
  ASSERT_TRUE(join("decode-1", life_3));
  EXPECT_FALSE(join("decode-1", life_2));
}

TEST_F(survival, epochs_go_up_even_if_the_last_changes_were_not_recorded) {
  bring_up("decode-0", life_1);
  const auto left = table.record();
  std::uint64_t highest = table.epoch();
  for (std::uint64_t i = 0; i < epoch_reserve / 2 - 1; ++i) {
    table.connection_lost("decode-0", life_1, "closed", now);
    ASSERT_TRUE(join("decode-0", life_1));
    highest = table.epoch();
  }
  membership_table next{deployment};
  next.restore(left, now);
  EXPECT_GT(next.epoch(), highest);
}

TEST_F(survival, a_node_that_the_deployment_has_no_more_is_left_out) {
  membership_record left{"demo", 5, {}};
  left.nodes.push_back({"decode-9", node_state::up, life_1, "127.0.0.1", 5000, 1, {}});
  table.restore(left, now);
  EXPECT_TRUE(table.view().members.empty());
  EXPECT_GE(table.epoch(), 5u);
}

TEST_F(survival, a_life_that_registers_with_a_restarted_supervisor_was_taken_in_when_it_was) {
  bring_up("decode-1", life_2);
  bring_up("decode-0", life_1);
  const auto before = shown("decode-0").registered;
  EXPECT_GT(before, shown("decode-1").registered);
  for (int i = 0; i < 2; ++i) {
    restart();
    EXPECT_EQ(shown("decode-0").registered, before);
    bring_up("decode-0", life_1);
    EXPECT_EQ(shown("decode-0").registered, before) << "what was placed on it holds";
  }
  ASSERT_TRUE(join("decode-1", life_3));
  EXPECT_EQ(shown("decode-1").registered, table.epoch());
  table.connection_lost("decode-0", life_1, "closed", now);
  restart();
  bring_up("decode-0", life_1);
  EXPECT_GT(shown("decode-0").registered, before) << "it was down";
}

TEST_F(survival, a_life_that_was_leaving_when_the_supervisor_was_restarted_was_never_out) {
  bring_up("decode-0", life_1);
  const auto before = shown("decode-0").registered;
  ASSERT_TRUE(table.drain("decode-0"));
  restart();
  bring_up("decode-0", life_1);
  EXPECT_EQ(shown("decode-0").registered, before);
  ASSERT_TRUE(table.drain("decode-0"));
  restart();
  pass(milliseconds{5100});
  bring_up("decode-0", life_1);
  EXPECT_GT(shown("decode-0").registered, before) << "too late";
}

TEST_F(survival, a_supervisor_collects_for_a_heartbeat_timeout_and_says_so) {
  EXPECT_EQ(table.view().collecting, 1)
      << "it knows of no other before it, and there may have been one";
  bring_up("decode-0", life_1);
  restart();
  EXPECT_EQ(table.view().collecting, 1);
  bring_up("decode-0", life_1);
  const auto list = table.take_broadcast(now);
  ASSERT_TRUE(list);
  EXPECT_EQ(list->collecting, 1);
  const auto stays = [&](milliseconds time) {
    for (; time.count() > 0; time -= milliseconds{100}) {
      pass(milliseconds{100});
      ASSERT_EQ(beat("decode-0", life_1), heartbeat_verdict::known);
    }
  };
  stays(milliseconds{4900});
  EXPECT_FALSE(table.take_broadcast(now));
  now += milliseconds{3000};  // it was frozen, so no node could register meanwhile
  stays(milliseconds{100});
  EXPECT_EQ(table.view().collecting, 1);
  stays(milliseconds{100});
  const auto whole = table.take_broadcast(now);
  ASSERT_TRUE(whole) << "that is news by itself";
  EXPECT_EQ(whole->collecting, 0);
  EXPECT_EQ(whole->epoch, list->epoch);
}

// -- which life uses which name

using kind = slot_use::kind;

struct names : survival {
  kind use_of(std::size_t slot) const { return table.uses(now).at(slot).how; }
  void beat_knowing(const std::string& name, std::uint64_t life, std::uint64_t epoch) {
    heartbeat h{name, life, ++sequence, {}, {}};
    h.epoch = epoch;
    EXPECT_EQ(table.heard(h, now), heartbeat_verdict::known);
  }
};

TEST_F(names, are_free_again_once_every_node_that_is_there_knows_of_the_end) {
  EXPECT_EQ(use_of(0), kind::unused);
  bring_up("decode-0", life_1);
  bring_up("decode-1", life_2);
  EXPECT_EQ(use_of(0), kind::used);
  table.connection_lost("decode-0", life_1, "closed", now);
  const auto end = table.epoch();
  EXPECT_EQ(use_of(0), kind::down);
  beat_knowing("decode-1", life_2, end - 1);
  EXPECT_EQ(use_of(0), kind::down);
  beat_knowing("decode-1", life_2, end + 1);
  EXPECT_EQ(use_of(0), kind::down) << "no epoch of this supervisor's";
  beat_knowing("decode-1", life_2, end);
  EXPECT_EQ(use_of(0), kind::fenced);
  EXPECT_EQ(table.uses(now).at(0).down_epoch, end);
  // A node that cannot learn of it any more is not waited for.
  table.connection_lost("decode-1", life_2, "closed", now);
  EXPECT_EQ(use_of(1), kind::fenced);
  ASSERT_TRUE(join("decode-0", life_3));
  EXPECT_EQ(use_of(0), kind::used);
  EXPECT_EQ(use_of(1), kind::down) << "the new one has heard of nothing yet";
}

TEST_F(names, the_first_beat_of_a_life_tells_nothing_of_what_it_knows_here) {
  bring_up("decode-0", life_1);
  table.connection_lost("decode-0", life_1, "closed", now);
  ASSERT_TRUE(join("decode-1", life_2));
  beat_knowing("decode-1", life_2, table.epoch());
  EXPECT_EQ(use_of(0), kind::down) << "it may speak of another supervisor's epochs";
  beat_knowing("decode-1", life_2, table.epoch());
  EXPECT_EQ(use_of(0), kind::fenced);
}

TEST_F(names, of_a_node_that_failed_and_lives_are_in_use) {
  bring_up("decode-0", life_1);
  (void)beat("decode-0", life_1, "no memory");
  EXPECT_EQ(use_of(0), kind::used);
}

TEST_F(names, are_awaited_after_a_restart_until_their_lives_have_had_time_to_come_back) {
  bring_up("decode-0", life_1);
  bring_up("decode-1", life_2);
  table.connection_lost("decode-1", life_2, "closed", now);
  restart();
  EXPECT_EQ(use_of(0), kind::used) << "it was there";
  EXPECT_EQ(use_of(1), kind::awaited) << "it may be back since that was written";
  pass(milliseconds{4900});
  EXPECT_EQ(use_of(1), kind::awaited);
  pass(milliseconds{200});
  EXPECT_EQ(use_of(0), kind::fenced);
  EXPECT_EQ(use_of(1), kind::fenced);
}

TEST_F(names, that_a_record_does_not_have_are_awaited_too_since_it_may_be_an_old_one) {
  bring_up("decode-0", life_1);
  restart();
  EXPECT_EQ(use_of(1), kind::awaited);
  ASSERT_TRUE(join("decode-1", life_2)) << "it had come first after the record was written";
  EXPECT_EQ(use_of(1), kind::used);
}

}  // namespace
}  // namespace troupe::actors
