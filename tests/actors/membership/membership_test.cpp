#include "troupe/actors/membership/membership.hpp"

#include <map>
#include <random>

#include <gmock/gmock.h>

#include "clocked_membership.hpp"

namespace troupe::actors {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;

using testing::clocked_membership;
using testing::life_1;
using testing::life_2;
using testing::request_of;

membership_options demo_options() {
  membership_options o;
  o.cluster = "demo";
  o.supervisor_incarnation = 7;
  o.slots = {{"prefill-0-0", "prefill", node_role::prefill, 0, 0, 1},
             {"decode-0-0", "decode", node_role::decode, 0, 0, 2},
             {"decode-0-1", "decode", node_role::decode, 0, 1, 2},
             {"decode-1-0", "decode", node_role::decode, 1, 0, 2},
             {"decode-1-1", "decode", node_role::decode, 1, 1, 2}};
  return o;
}

/// A cluster in which decode-0-0 is the node that all events happen to.
struct membership_of_a_cluster : clocked_membership {
  membership_of_a_cluster() : clocked_membership{demo_options()} {}

  heartbeat_verdict beat(const std::string& name, std::uint64_t incarnation,
                         std::uint32_t queue = 0) {
    heartbeat h;
    h.name = name;
    h.incarnation = incarnation;
    h.sequence = ++sequence;
    h.load.queue_length = queue;
    return table.heard(h, now);
  }
  std::optional<node_state> state() const { return table.state_of("decode-0-0"); }

  /// Brings life 1 of decode-0-0 into a state.
  void bring_to(std::optional<node_state> wanted) {
    if (!wanted) return;
    ASSERT_TRUE(join("decode-0-0", life_1));
    if (*wanted == node_state::joining) return;
    ASSERT_EQ(beat("decode-0-0", life_1), heartbeat_verdict::known);
    switch (*wanted) {
      case node_state::joining:
      case node_state::up: break;
      case node_state::suspect: pass(milliseconds{3100}); break;
      case node_state::down: table.connection_lost("decode-0-0", life_1, "closed", now); break;
      case node_state::leaving: table.leave("decode-0-0", life_1, now); break;
    }
    ASSERT_EQ(state(), wanted);
  }
};

TEST_F(membership_of_a_cluster, a_node_that_registers_gets_the_replica_of_its_slot_and_is_joining) {
  const auto reply = join("decode-1-1", life_1);
  ASSERT_TRUE(reply);
  EXPECT_EQ(reply->failed, 0);
  EXPECT_EQ(reply->replica, 1u);
  EXPECT_EQ(reply->supervisor_incarnation, 7u);
  EXPECT_EQ(reply->heartbeat_interval_ms, 1000u);
  EXPECT_EQ(table.state_of("decode-1-1"), node_state::joining);
  ASSERT_EQ(table.view().members.size(), 1u);
  EXPECT_EQ(table.view().members[0].node.replica, 1u);
}

TEST_F(membership_of_a_cluster, what_a_node_says_of_its_replica_does_not_count) {
  auto request = request_of(deployment, "decode-1-0", life_1);
  request.wanted_replica = 9;
  request.node.replica = 9;
  const auto reply = table.registered(request, now);
  ASSERT_TRUE(reply);
  EXPECT_EQ(reply->replica, 1u);
  EXPECT_EQ(table.view().members[0].node.replica, 1u);
}

TEST_F(membership_of_a_cluster, the_first_heartbeat_brings_a_node_up_and_its_load_is_in_the_list) {
  ASSERT_TRUE(join("prefill-0-0", life_1));
  EXPECT_EQ(beat("prefill-0-0", life_1, 17), heartbeat_verdict::known);
  EXPECT_EQ(table.state_of("prefill-0-0"), node_state::up);
  EXPECT_EQ(table.view().members[0].load.queue_length, 17u);
}

// -- every state and every event

enum class event { same_life, next_life, heartbeat, silent, timed_out, lost, leave, drain, cancel };

struct transition {
  std::optional<node_state> from;
  event what;
  std::optional<node_state> to;
};

struct tabled : membership_of_a_cluster, ::testing::WithParamInterface<transition> {
  /// Applies an event to decode-0-0. Returns whether the table accepts it.
  bool happens(event what) {
    switch (what) {
      case event::same_life: return join("decode-0-0", life_1).has_value();
      case event::next_life: return join("decode-0-0", life_2, 5001).has_value();
      case event::heartbeat: return beat("decode-0-0", life_1) == heartbeat_verdict::known;
      case event::silent: pass(milliseconds{3100}); break;
      case event::timed_out: pass(milliseconds{5100}); break;
      case event::lost: return table.connection_lost("decode-0-0", life_1, "closed", now);
      case event::leave: return table.leave("decode-0-0", life_1, now);
      case event::drain: return table.drain("decode-0-0").has_value();
      case event::cancel: return table.cancel_drain("decode-0-0", now).has_value();
    }
    return true;
  }
};

struct every_transition : tabled {};

TEST_P(every_transition, ends_in_the_state_of_the_table) {
  const auto [from, what, to] = GetParam();
  bring_to(from);
  const std::uint64_t epoch = table.epoch();
  const bool agreed = happens(what);
  if (what == event::cancel) {
    EXPECT_FALSE(agreed) << "there is no drain";
  }
  EXPECT_EQ(state(), to);
  if (from == to && what != event::next_life) {
    EXPECT_EQ(table.epoch(), epoch) << "no change, no epoch";
  } else if (from != to) {
    EXPECT_GT(table.epoch(), epoch);
  }
}

constexpr std::optional<node_state> absent{};
constexpr node_state joining = node_state::joining, up = node_state::up,
                     suspect = node_state::suspect, down = node_state::down,
                     leaving = node_state::leaving;

INSTANTIATE_TEST_SUITE_P(
    membership, every_transition,
    ::testing::Values(
        transition{absent, event::same_life, joining}, transition{absent, event::heartbeat, absent},
        transition{absent, event::timed_out, absent}, transition{absent, event::lost, absent},
        transition{absent, event::leave, absent}, transition{absent, event::drain, absent},
        transition{absent, event::cancel, absent}, transition{joining, event::cancel, joining},
        transition{up, event::cancel, up}, transition{suspect, event::cancel, suspect},
        transition{leaving, event::cancel, leaving}, transition{down, event::cancel, down},
        //
        transition{joining, event::same_life, joining},
        transition{joining, event::next_life, joining}, transition{joining, event::heartbeat, up},
        transition{joining, event::silent, joining}, transition{joining, event::timed_out, down},
        transition{joining, event::lost, down}, transition{joining, event::leave, leaving},
        transition{joining, event::drain, leaving},
        //
        transition{up, event::same_life, up}, transition{up, event::next_life, up},
        transition{up, event::heartbeat, up}, transition{up, event::silent, suspect},
        transition{up, event::timed_out, down}, transition{up, event::lost, down},
        transition{up, event::leave, leaving}, transition{up, event::drain, leaving},
        //
        transition{suspect, event::same_life, suspect},
        transition{suspect, event::next_life, joining}, transition{suspect, event::heartbeat, up},
        transition{suspect, event::timed_out, down}, transition{suspect, event::lost, down},
        transition{suspect, event::leave, leaving}, transition{suspect, event::drain, leaving},
        //
        transition{leaving, event::same_life, joining},
        transition{leaving, event::next_life, joining},
        transition{leaving, event::heartbeat, leaving}, transition{leaving, event::silent, leaving},
        transition{leaving, event::timed_out, down}, transition{leaving, event::lost, down},
        transition{leaving, event::leave, leaving}, transition{leaving, event::drain, leaving},
        //
        transition{down, event::same_life, joining}, transition{down, event::next_life, joining},
        transition{down, event::heartbeat, down}, transition{down, event::timed_out, down},
        transition{down, event::lost, down}, transition{down, event::leave, down},
        transition{down, event::drain, down}));

// -- a drain

/// Every state that a drained node can be in, and every event.
struct every_transition_of_a_drain : tabled {};

TEST_P(every_transition_of_a_drain, ends_in_the_state_of_the_table) {
  const auto [from, what, to] = GetParam();
  bring_to(up);
  ASSERT_TRUE(table.drain("decode-0-0"));
  if (from == down) table.connection_lost("decode-0-0", life_1, "closed", now);
  const bool agreed = happens(what);
  if (what == event::drain) {
    EXPECT_FALSE(agreed) << "it is drained already";
  }
  if (what == event::cancel) {
    EXPECT_EQ(agreed, from == leaving);
  }
  EXPECT_EQ(state(), to);
}

INSTANTIATE_TEST_SUITE_P(
    membership, every_transition_of_a_drain,
    ::testing::Values(
        transition{leaving, event::same_life, leaving},
        transition{leaving, event::next_life, joining},
        transition{leaving, event::heartbeat, leaving}, transition{leaving, event::silent, leaving},
        transition{leaving, event::timed_out, down}, transition{leaving, event::lost, down},
        transition{leaving, event::leave, leaving}, transition{leaving, event::drain, leaving},
        transition{leaving, event::cancel, up}, transition{down, event::cancel, down},
        //
        transition{down, event::same_life, leaving}, transition{down, event::next_life, joining},
        transition{down, event::heartbeat, down}, transition{down, event::timed_out, down},
        transition{down, event::lost, down}, transition{down, event::leave, down},
        transition{down, event::drain, down}));

TEST_F(membership_of_a_cluster, says_why_a_node_cannot_be_drained) {
  const auto why = [&](std::string_view name) {
    const auto refused = table.drain(name);
    return refused ? std::string{} : to_string(refused.error());
  };
  EXPECT_THAT(why("decode-9"), HasSubstr("not_found: the deployment has no node 'decode-9'; it has "
                                         "prefill-0-0, decode-0-0"));
  EXPECT_THAT(why("supervisor"), HasSubstr("invalid_config: the supervisor"));
  EXPECT_THAT(why("decode-0-0"), HasSubstr("not_found: node 'decode-0-0' has never registered"));
  bring_to(up);
  EXPECT_EQ(why("decode-0-0"), "");
  EXPECT_THAT(why("decode-0-0"), HasSubstr("already_exists: node 'decode-0-0' is being drained"));
  table.connection_lost("decode-0-0", life_1, "closed", now);
  EXPECT_THAT(
      why("decode-0-0"),
      HasSubstr("peer_lost: node 'decode-0-0' is down (lost while it was drained: closed)"));
}

TEST_F(membership_of_a_cluster, says_of_a_drained_node_why_it_is_gone) {
  const auto reason = [&] { return table.view().members.at(0).reason; };
  bring_to(up);
  ASSERT_TRUE(table.drain("decode-0-0"));
  const auto epoch = table.epoch();
  table.draining("decode-0-0", life_1, "has two requests");
  EXPECT_EQ(reason(), "has two requests");
  table.draining("decode-0-0", life_2, "another life's");
  EXPECT_EQ(reason(), "has two requests");
  table.drained("decode-0-0", life_1, "drained");
  EXPECT_EQ(table.epoch(), epoch);
  table.leave("decode-0-0", life_1, now);
  EXPECT_EQ(state(), leaving);
  table.connection_lost("decode-0-0", life_1, "closed", now);
  EXPECT_EQ(reason(), "drained");
  ASSERT_TRUE(join("decode-0-0", life_2, 5001));
  EXPECT_EQ(beat("decode-0-0", life_2), heartbeat_verdict::known);
  EXPECT_EQ(state(), up) << "another life starts afresh";
}

TEST_F(membership_of_a_cluster, a_node_that_is_told_to_stop_in_its_drain_was_not_drained) {
  bring_to(up);
  ASSERT_TRUE(table.drain("decode-0-0"));
  table.leave("decode-0-0", life_1, now);
  table.connection_lost("decode-0-0", life_1, "closed", now);
  EXPECT_EQ(table.view().members.at(0).reason, "left before it was drained");
}

TEST_F(membership_of_a_cluster, a_node_that_leaves_by_its_own_word_and_stays_can_be_drained) {
  bring_to(leaving);
  EXPECT_EQ(*table.drain("decode-0-0"), life_1);
  ASSERT_TRUE(join("decode-0-0", life_1));
  EXPECT_EQ(state(), leaving);
}

TEST_F(membership_of_a_cluster, a_cancelled_drain_is_over_for_all_ranks_of_the_replica) {
  bring_to(up);
  ASSERT_TRUE(join("decode-0-1", life_2));
  EXPECT_EQ(beat("decode-0-1", life_2), heartbeat_verdict::known);
  ASSERT_TRUE(table.drain("decode-0-0"));
  ASSERT_TRUE(table.drain("decode-0-1"));
  const auto serving = table.cancel_drain("decode-0-1", now);
  ASSERT_TRUE(serving) << serving.error().message;
  EXPECT_EQ(*serving, (std::vector<node_life>{{"decode-0-0", life_1}, {"decode-0-1", life_2}}));
  EXPECT_EQ(state(), up);
  EXPECT_EQ(table.state_of("decode-0-1"), up);
  EXPECT_EQ(table.view().members.at(0).reason, "its drain was cancelled");
  ASSERT_TRUE(table.drain("decode-0-0")) << "and it can be drained again";
}

TEST_F(membership_of_a_cluster,
       a_rank_that_was_lost_in_a_drain_serves_when_it_is_back_after_cancel) {
  bring_to(up);
  ASSERT_TRUE(join("decode-0-1", life_2));
  ASSERT_TRUE(table.drain("decode-0-0"));
  ASSERT_TRUE(table.drain("decode-0-1"));
  table.connection_lost("decode-0-0", life_1, "closed", now);
  const auto down_too = table.cancel_drain("decode-0-0", now);
  ASSERT_FALSE(down_too);
  EXPECT_EQ(down_too.error().code, errc::peer_lost);
  ASSERT_TRUE(table.cancel_drain("decode-0-1", now));
  ASSERT_TRUE(join("decode-0-0", life_1));
  EXPECT_EQ(beat("decode-0-0", life_1), heartbeat_verdict::known);
  EXPECT_EQ(state(), up);
}

TEST_F(membership_of_a_cluster, a_silent_node_whose_drain_is_cancelled_is_suspect) {
  bring_to(up);
  ASSERT_TRUE(table.drain("decode-0-0"));
  pass(milliseconds{3100});
  ASSERT_TRUE(table.cancel_drain("decode-0-0", now));
  EXPECT_EQ(state(), suspect);
}

TEST_F(membership_of_a_cluster, says_why_a_drain_cannot_be_cancelled) {
  const auto why = [&](std::string_view name) {
    const auto refused = table.cancel_drain(name, now);
    return refused ? std::string{} : to_string(refused.error());
  };
  EXPECT_THAT(why("decode-9"), HasSubstr("not_found: the deployment has no node 'decode-9'"));
  EXPECT_THAT(why("decode-0-0"), HasSubstr("has never registered"));
  bring_to(up);
  EXPECT_THAT(why("decode-0-0"),
              HasSubstr("not_found: node 'decode-0-0' is up: it is not being drained"));
  ASSERT_TRUE(table.drain("decode-0-0"));
  table.drained("decode-0-0", life_1, "drained");
  EXPECT_THAT(why("decode-0-0"),
              HasSubstr("peer_lost: node 'decode-0-0' was told to leave already (drained)"));
  table.drained("decode-0-0", life_1, "left when its deadline passed");
  EXPECT_THAT(why("decode-0-0"), HasSubstr("was told to leave already (left when its deadline"));
  table.drained("decode-0-0", life_1, "drained");
  table.connection_lost("decode-0-0", life_1, "closed", now);
  EXPECT_THAT(why("decode-0-0"), HasSubstr("peer_lost: node 'decode-0-0' is down (drained)"));
}

TEST_F(membership_of_a_cluster, who_leaves_by_its_own_word_does_so_whatever_is_cancelled) {
  bring_to(leaving);
  const auto why = [&] {
    const auto refused = table.cancel_drain("decode-0-0", now);
    return refused ? std::string{} : to_string(refused.error());
  };
  EXPECT_THAT(why(), HasSubstr("peer_lost: node 'decode-0-0' leaves of its own accord"));
  ASSERT_TRUE(table.drain("decode-0-0"));
  EXPECT_THAT(why(), HasSubstr("leaves of its own accord, or has been drained since before the "));
  EXPECT_EQ(state(), leaving);
  table.connection_lost("decode-0-0", life_1, "closed", now);
  EXPECT_EQ(table.view().members.at(0).reason, "left");
}

TEST_F(membership_of_a_cluster, who_stops_while_it_is_drained_does_so_whatever_is_cancelled) {
  bring_to(up);
  ASSERT_TRUE(table.drain("decode-0-0"));
  ASSERT_TRUE(table.leave("decode-0-0", life_1, now));
  const auto refused = table.cancel_drain("decode-0-0", now);
  ASSERT_FALSE(refused);
  EXPECT_THAT(to_string(refused.error()), HasSubstr("peer_lost: node 'decode-0-0' leaves of its"));
  EXPECT_EQ(state(), leaving);
}

// -- when a life was taken in

TEST_F(membership_of_a_cluster, shows_when_a_life_was_taken_in_and_not_what_happened_since) {
  const auto registered = [&] { return table.view().members.at(0).registered; };
  bring_to(joining);
  const auto first = table.epoch();
  EXPECT_EQ(registered(), first);
  EXPECT_EQ(beat("decode-0-0", life_1), heartbeat_verdict::known);
  pass(milliseconds{3100});
  EXPECT_EQ(beat("decode-0-0", life_1), heartbeat_verdict::known);
  ASSERT_TRUE(join("decode-0-0", life_1, 6000)) << "under another address";
  EXPECT_GT(table.epoch(), first);
  EXPECT_EQ(registered(), first);
  ASSERT_TRUE(table.drain("decode-0-0"));
  ASSERT_TRUE(join("decode-0-0", life_1, 6000));
  EXPECT_EQ(registered(), first) << "it was never out";
}

TEST_F(membership_of_a_cluster, a_life_that_was_down_is_taken_in_anew) {
  const auto registered = [&] { return table.view().members.at(0).registered; };
  bring_to(up);
  table.connection_lost("decode-0-0", life_1, "closed", now);
  ASSERT_TRUE(join("decode-0-0", life_1));
  EXPECT_EQ(registered(), table.epoch());
  EXPECT_EQ(beat("decode-0-0", life_1), heartbeat_verdict::known);
  ASSERT_TRUE(table.drain("decode-0-0"));
  table.connection_lost("decode-0-0", life_1, "closed", now);
  ASSERT_TRUE(join("decode-0-0", life_1));
  EXPECT_EQ(registered(), table.epoch()) << "also one that drains";
  ASSERT_TRUE(join("decode-0-0", life_2));
  EXPECT_EQ(registered(), table.epoch());
}

// -- former lives

TEST_F(membership_of_a_cluster, a_second_process_under_the_name_of_a_live_one_is_refused) {
  bring_to(up);
  const auto reply = join("decode-0-0", life_2, 5001);
  ASSERT_FALSE(reply);
  EXPECT_EQ(reply.error().code, errc::already_exists);
  EXPECT_THAT(reply.error().message, HasSubstr("node 'decode-0-0' is up at '127.0.0.1' port 5000"));
  EXPECT_EQ(table.incarnation_of("decode-0-0"), life_1);
}

TEST_F(membership_of_a_cluster, a_process_that_listens_on_the_address_of_the_old_one_replaces_it) {
  bring_to(up);
  ASSERT_TRUE(join("decode-0-0", life_2, 5000));
  EXPECT_EQ(table.incarnation_of("decode-0-0"), life_2);
  EXPECT_EQ(state(), joining);
}

TEST_F(membership_of_a_cluster, a_former_life_can_neither_beat_nor_register_nor_leave_nor_be_lost) {
  bring_to(down);
  ASSERT_TRUE(join("decode-0-0", life_2, 5001));
  ASSERT_EQ(beat("decode-0-0", life_2), heartbeat_verdict::known);
  EXPECT_EQ(beat("decode-0-0", life_1), heartbeat_verdict::stale);
  EXPECT_FALSE(table.leave("decode-0-0", life_1, now));
  EXPECT_FALSE(table.connection_lost("decode-0-0", life_1, "closed", now));
  EXPECT_EQ(state(), up);
  const auto reply = join("decode-0-0", life_1);
  ASSERT_FALSE(reply);
  EXPECT_EQ(reply.error().code, errc::stale_incarnation);
  ASSERT_TRUE(table.connection_lost("decode-0-0", life_2, "closed", now));
  const auto again = join("decode-0-0", life_1);
  ASSERT_FALSE(again) << "not even when its successor is gone";
  EXPECT_EQ(again.error().code, errc::stale_incarnation);
}

TEST_F(membership_of_a_cluster, a_supervisor_that_knows_nobody_tells_them_to_register_again) {
  EXPECT_EQ(beat("decode-0-0", life_1), heartbeat_verdict::unknown);
  EXPECT_EQ(beat("who-is-that", life_1), heartbeat_verdict::unknown);
  EXPECT_FALSE(table.ack(heartbeat_verdict::unknown).known);
  EXPECT_TRUE(table.ack(heartbeat_verdict::known).known);
}

TEST_F(membership_of_a_cluster, a_node_that_was_down_comes_back_by_registering_only) {
  bring_to(down);
  EXPECT_EQ(beat("decode-0-0", life_1), heartbeat_verdict::unknown);
  EXPECT_EQ(state(), down);
  ASSERT_TRUE(join("decode-0-0", life_1));
  EXPECT_EQ(beat("decode-0-0", life_1), heartbeat_verdict::known);
  EXPECT_EQ(state(), up);
}

// -- refusals

TEST_F(membership_of_a_cluster, refuses_what_does_not_fit_the_deployment_in_one_sentence_each) {
  const auto refused = [&](auto&& spoil) {
    auto request = request_of(deployment, "decode-0-1", life_1);
    spoil(request);
    const auto reply = table.registered(request, now);
    return reply ? std::string{"accepted"} : to_string(reply.error());
  };
  using r = registration_request;
  EXPECT_THAT(refused([](r& x) { x.version = 99; }),
              HasSubstr("version_mismatch: node 'decode-0-1' speaks protocol version 99, this "
                        "supervisor speaks version"));
  EXPECT_THAT(refused([](r& x) { x.cluster = "other"; }),
              HasSubstr("invalid_config: node 'decode-0-1' belongs to cluster 'other', this "
                        "supervisor to cluster 'demo'"));
  EXPECT_THAT(refused([](r& x) { x.node.name = "decode-7-0"; }),
              HasSubstr("not_found: the deployment has no node 'decode-7-0' (it has prefill-0-0, "
                        "decode-0-0"));
  EXPECT_THAT(refused([](r& x) { x.node.role = static_cast<std::uint8_t>(node_role::prefill); }),
              HasSubstr("registers with role prefill but the deployment says decode"));
  EXPECT_THAT(refused([](r& x) { x.node.role = 200; }), HasSubstr("role number 200"));
  EXPECT_THAT(refused([](r& x) { x.node.stage = "prefill"; }),
              HasSubstr("stage 'prefill' but the deployment says decode"));
  EXPECT_THAT(refused([](r& x) { x.node.rank = 0; }),
              HasSubstr("rank 0 but the deployment says 1"));
  EXPECT_THAT(refused([](r& x) { x.node.ranks = 4; }),
              HasSubstr("number of ranks 4 but the deployment says 2"));
  EXPECT_THAT(refused([](r& x) { x.node.port = 0; }), HasSubstr("without a host, a bound port"));
  EXPECT_THAT(refused([](r& x) { x.node.boot_id = "\033[2J"; }),
              HasSubstr("registers with an invalid boot id"));
  EXPECT_THAT(refused([](r& x) { x.node.boot_id.assign(65, 'a'); }),
              HasSubstr("registers with an invalid boot id"));
  EXPECT_THAT(refused([](r& x) { x.node.host.clear(); }), HasSubstr("without a host"));
  EXPECT_THAT(refused([](r& x) { x.node.host.assign(100000, 'h'); }), HasSubstr("without a host"));
  EXPECT_THAT(refused([](r& x) { x.node.incarnation = 0; }), HasSubstr("or an incarnation"));
  EXPECT_EQ(table.epoch(), 0u);
  EXPECT_TRUE(table.view().members.empty());
}

TEST_F(membership_of_a_cluster, what_a_stranger_sends_is_quoted_short_and_printable) {
  auto request = request_of(deployment, "decode-0-1", life_1);
  request.cluster = std::string(1 << 20, '\x01') + "\n\033[31m";
  const auto reply = table.registered(request, now);
  ASSERT_FALSE(reply);
  EXPECT_LT(reply.error().message.size(), 400u);
  for (char c : reply.error().message) EXPECT_TRUE(c >= ' ' && c <= '~');
}

// -- time

TEST_F(membership_of_a_cluster,
       silence_makes_suspect_after_three_intervals_and_down_at_the_timeout) {
  bring_to(up);
  pass(milliseconds{2950});
  EXPECT_EQ(state(), up);
  pass(milliseconds{50});
  EXPECT_EQ(state(), suspect);
  pass(milliseconds{1950});
  EXPECT_EQ(state(), suspect);
  pass(milliseconds{50});
  EXPECT_EQ(state(), down);
}

TEST_F(membership_of_a_cluster,
       a_heartbeat_that_arrives_with_an_older_time_does_not_shorten_the_rest) {
  bring_to(up);
  const steady_time late = now;
  pass(milliseconds{1000});
  ASSERT_EQ(beat("decode-0-0", life_1), heartbeat_verdict::known);
  heartbeat old;
  old.name = "decode-0-0";
  old.incarnation = life_1;
  old.load.queue_length = 99;
  EXPECT_EQ(table.heard(old, late), heartbeat_verdict::known);
  EXPECT_EQ(table.view().members[0].load.queue_length, 0u) << "an overtaken load is not recorded";
  pass(milliseconds{2900});
  EXPECT_EQ(state(), up);
}

TEST_F(membership_of_a_cluster, a_supervisor_that_stood_still_blames_nobody_for_it) {
  bring_to(up);
  pass(milliseconds{500});
  now += std::chrono::seconds{60};  // the supervisor was stopped and continued
  table.tick(now);
  EXPECT_EQ(state(), up);
  pass(milliseconds{2450});
  EXPECT_EQ(state(), up);
  pass(milliseconds{100});
  EXPECT_EQ(state(), suspect) << "but from then on silence counts as ever";
}

TEST_F(membership_of_a_cluster, nobody_takes_a_place_because_the_supervisor_stood_still) {
  bring_to(up);
  pass(milliseconds{500});
  now += std::chrono::seconds{60};  // it reads a registration before the heartbeats that are queued
  const auto taken = join("decode-0-0", life_2, 5001);
  ASSERT_FALSE(taken);
  EXPECT_EQ(taken.error().code, errc::already_exists);
  ASSERT_EQ(beat("decode-0-0", life_1), heartbeat_verdict::known);
  pass(milliseconds{3100});
  EXPECT_TRUE(join("decode-0-0", life_2, 5001)) << "from then on silence counts as ever";
}

// -- broadcasts

TEST_F(membership_of_a_cluster, changes_are_told_at_once_and_then_at_most_once_per_interval) {
  EXPECT_FALSE(table.take_broadcast(now)) << "nothing happened yet";
  ASSERT_TRUE(join("decode-0-0", life_1));
  ASSERT_TRUE(table.take_broadcast(now));
  ASSERT_TRUE(join("decode-0-1", life_1, 5001));
  ASSERT_TRUE(join("decode-1-0", life_1, 5002));
  EXPECT_FALSE(table.take_broadcast(now));
  EXPECT_FALSE(table.take_broadcast(now + milliseconds{99}));
  const auto list = table.take_broadcast(now + milliseconds{100});
  ASSERT_TRUE(list);
  EXPECT_EQ(list->members.size(), 3u);
  EXPECT_EQ(list->epoch, table.epoch());
  EXPECT_FALSE(table.take_broadcast(now + std::chrono::seconds{10})) << "nothing changed since";
}

TEST_F(membership_of_a_cluster, a_new_load_alone_is_no_change) {
  bring_to(up);
  (void)table.take_broadcast(now);
  const auto epoch = table.epoch();
  pass(milliseconds{500});
  ASSERT_EQ(beat("decode-0-0", life_1, 5), heartbeat_verdict::known);
  EXPECT_EQ(table.epoch(), epoch);
  EXPECT_FALSE(table.take_broadcast(now));
}

TEST_F(membership_of_a_cluster, every_change_is_reported_once_for_the_log) {
  bring_to(up);
  const auto changes = table.take_transitions();
  ASSERT_EQ(changes.size(), 2u);
  EXPECT_EQ(changes[0].from, std::nullopt);
  EXPECT_EQ(changes[0].to, joining);
  EXPECT_EQ(changes[1].from, joining);
  EXPECT_EQ(changes[1].to, up);
  EXPECT_EQ(changes[1].epoch, 2u);
  EXPECT_TRUE(table.take_transitions().empty());
}

// -- any events in any order

/// A minimal model of the table: when each life was last accepted or heard.
struct any_events : ::testing::TestWithParam<std::uint32_t> {};

TEST_P(any_events, keep_epochs_growing_and_nobody_up_who_is_silent_or_stale) {
  std::mt19937 random{GetParam()};
  membership_table table{demo_options()};
  const auto slots = demo_options().slots;
  steady_time now{std::chrono::hours{1}};
  std::map<std::string, std::pair<std::uint64_t, steady_time>>
      last_heard;  // the life registered last
  std::map<std::string, std::vector<std::uint64_t>> replaced;
  std::uint64_t next_life = 1;
  std::uint64_t epoch = 0;
  std::uint64_t reported = 0;
  for (int step = 0; step < 4000; ++step) {
    const std::string& name = slots[random() % slots.size()].name;
    const auto known = last_heard.find(name);
    const bool current = random() % 4 != 0 && known != last_heard.end();
    const std::uint64_t life = current ? known->second.first : 1 + random() % (next_life + 1);
    switch (random() % 8) {
      case 0: {
        const std::uint64_t id = random() % 2 == 0 ? ++next_life : life;
        const auto reply = table.registered(
            request_of(demo_options(), name, id, static_cast<std::uint16_t>(1 + random() % 3)),
            now);
        const auto& gone = replaced[name];
        if (std::ranges::find(gone, id) != gone.end()) {
          ASSERT_FALSE(reply) << "a replaced life came back";
        }
        if (reply) {
          if (known != last_heard.end() && known->second.first != id) {
            replaced[name].push_back(known->second.first);
            if (replaced[name].size() > 16) replaced[name].erase(replaced[name].begin());
          }
          last_heard[name] = {id, now};
        }
        break;
      }
      case 1:
      case 2:
      case 3: {
        heartbeat h{name, life, static_cast<std::uint64_t>(step), {}, {}};
        if (table.heard(h, now) == heartbeat_verdict::known) {
          ASSERT_EQ(last_heard.at(name).first, life) << "a life that was not taken in is known";
          last_heard[name].second = now;
        }
        break;
      }
      case 4: table.connection_lost(name, life, "closed", now); break;
      case 5:
        if (random() % 4 == 0) table.leave(name, life, now);
        if (random() % 16 == 0) (void)table.drain(name);
        if (table.state_of(name) == leaving) last_heard[name].second = now;
        break;
      default:
        now += milliseconds{random() % 900};
        table.tick(now);
        for (const member& m : table.view().members) {
          const auto silent = now - last_heard.at(m.node.name).second;
          const auto state = node_state_from(m.state);
          ASSERT_TRUE(state);
          if (*state == up) {
            ASSERT_LT(silent, milliseconds{3000});
          }
          if (*state == suspect) {
            ASSERT_LT(silent, milliseconds{5000});
          }
          if (*state == joining) {
            ASSERT_LT(silent, milliseconds{5000});
          }
        }
        break;
    }
    ASSERT_GE(table.epoch(), epoch) << "the epoch went back";
    for (const node_transition& t : table.take_transitions()) {
      ASSERT_EQ(t.epoch, ++reported) << "a change without an epoch of its own";
    }
    ASSERT_EQ(reported, table.epoch());
    epoch = table.epoch();
    for (const member& m : table.view().members) {
      ASSERT_EQ(m.node.incarnation, last_heard.at(m.node.name).first);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(membership, any_events, ::testing::Range(1u, 21u));

TEST(enums_that_come_from_outside, are_checked_against_their_range) {
  for (int n = 0; n < 256; ++n) {
    const auto number = static_cast<std::uint8_t>(n);
    EXPECT_EQ(node_role_from(number).has_value(), n >= 1 && n <= 5) << n;
    EXPECT_EQ(node_state_from(number).has_value(), n >= 1 && n <= 5) << n;
  }
  EXPECT_EQ(to_string(node_role::store), "store");
  EXPECT_EQ(to_string(node_state::suspect), "suspect");
}

}  // namespace
}  // namespace troupe::actors
