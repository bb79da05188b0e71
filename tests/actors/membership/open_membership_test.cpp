// Nodes that no file names, at the supervisor's table: which are accepted, what happens to a
// replica whose ranks disagree, and when a name is free again.

#include <gmock/gmock.h>

#include "clocked_membership.hpp"

namespace troupe::actors {
namespace {

using std::chrono::milliseconds;
using std::chrono::minutes;
using ::testing::HasSubstr;
using ::testing::SizeIs;

using testing::clocked_membership;
using testing::life_1;
using testing::life_2;
using testing::life_3;
using testing::request_of;

constexpr kvcache::layout_fingerprint llama{1};
constexpr kvcache::layout_fingerprint mixtral{2};

membership_options open_options(std::uint32_t max_nodes) {
  membership_options o;
  o.cluster = "demo";
  o.supervisor_incarnation = 7;
  o.slots = {{"store-0", "store", node_role::store, 0, 0, 1}};
  o.open = {{"engines", node_role::both, max_nodes}};
  return o;
}

registration_request stranger(const std::string& replica, std::uint64_t life,
                              std::uint32_t rank = 0, std::uint32_t ranks = 1) {
  registration_request r;
  r.cluster = "demo";
  r.join = 1;
  r.node.name = "engines." + replica + "." + std::to_string(rank);
  r.node.stage = "engines";
  r.node.role = static_cast<std::uint8_t>(node_role::both);
  r.node.rank = rank;
  r.node.ranks = ranks;
  r.node.host = "127.0.0.1";
  r.node.port = 5000;
  r.node.incarnation = life;
  r.node.pid = 42;
  r.node.replica_name = replica;
  r.node.fingerprint = llama;
  return r;
}

struct open_membership : clocked_membership {
  explicit open_membership(std::uint32_t max_nodes = 4)
      : clocked_membership{open_options(max_nodes)} {}

  result<registration> joins(const registration_request& request) {
    return table.registered(request, now);
  }
  errc refused(const registration_request& request) {
    const auto epoch = table.epoch();
    const auto answer = joins(request);
    EXPECT_FALSE(answer);
    EXPECT_EQ(table.epoch(), epoch) << "a refusal changes nothing";
    if (answer) return errc::internal;
    why = answer.error().message;
    return answer.error().code;
  }
  void beats(const registration_request& request) {
    heartbeat h;
    h.name = request.node.name;
    h.incarnation = request.node.incarnation;
    h.sequence = ++sequence;
    ASSERT_EQ(table.heard(h, now), heartbeat_verdict::known);
  }
  void comes_up(const registration_request& request) {
    const auto in = joins(request);
    ASSERT_TRUE(in) << in.error().message;
    beats(request);
  }
  void is_lost(const registration_request& request) {
    ASSERT_TRUE(table.connection_lost(request.node.name, request.node.incarnation, "closed", now));
  }
  std::vector<std::string> names() const {
    std::vector<std::string> all;
    for (const member& m : table.view().members) all.push_back(m.node.name);
    return all;
  }

  std::string why;
};

TEST_F(open_membership, a_stranger_is_let_in_as_what_it_announces) {
  auto request = stranger("a", life_1);
  request.node.labels = {{"http", "127.0.0.1:8000"}};
  comes_up(request);
  const auto seen = table.view().members;
  ASSERT_THAT(seen, SizeIs(1));
  EXPECT_EQ(seen[0].node.name, "engines.a.0");
  EXPECT_EQ(seen[0].node.replica_name, "a");
  EXPECT_EQ(seen[0].node.fingerprint, llama);
  EXPECT_EQ(seen[0].node.labels, request.node.labels);
  EXPECT_EQ(table.state_of("engines.a.0"), node_state::up);
}

TEST_F(open_membership, ranks_of_a_replica_share_a_number_that_no_other_replica_has) {
  const auto a0 = joins(stranger("a", 1, 0, 2));
  const auto b0 = joins(stranger("b", 2));
  const auto a1 = joins(stranger("a", 3, 1, 2));
  ASSERT_TRUE(a0 && b0 && a1);
  EXPECT_EQ(a0->replica, a1->replica);
  EXPECT_NE(a0->replica, b0->replica);
  EXPECT_THAT(table.replica_of("engines.a.1"), SizeIs(2));
  EXPECT_THAT(table.replica_of("engines.b.0"), SizeIs(1));
  EXPECT_THAT(table.replica_of("engines.c.0"), SizeIs(0));
}

TEST_F(open_membership, who_announces_what_its_stage_is_not_is_refused_by_name) {
  auto request = stranger("a", life_1);
  request.node.stage = "store";
  EXPECT_EQ(refused(request), errc::not_found);
  EXPECT_THAT(why, HasSubstr("stages that are: engines"));

  request = stranger("a", life_1);
  request.node.role = static_cast<std::uint8_t>(node_role::prefill);
  EXPECT_EQ(refused(request), errc::invalid_config);
  EXPECT_THAT(why, HasSubstr("whose role is both"));

  request = stranger("a", life_1);
  request.node.name = "engines.b.0";
  EXPECT_EQ(refused(request), errc::invalid_config);
  EXPECT_THAT(why, HasSubstr("engines.a.0"));

  request = stranger("a", life_1);
  request.node.name = "store-0";
  EXPECT_EQ(refused(request), errc::invalid_config);

  for (const char* name : {"", "A", "a.b", "-a", "a/b"}) {
    EXPECT_EQ(refused(stranger(name, life_1)), errc::invalid_config) << name;
  }
  EXPECT_EQ(refused(stranger(std::string(65, 'a'), life_1)), errc::invalid_config);
  EXPECT_EQ(refused(stranger("a", life_1, 1, 1)), errc::invalid_config);
  EXPECT_EQ(refused(stranger("a", life_1, 0, 0)), errc::invalid_config);
  EXPECT_EQ(refused(stranger("a", life_1, 0, 5)), errc::invalid_config);
  EXPECT_THAT(why, HasSubstr("1 to 4 ranks")) << "more than the stage is open to";
  EXPECT_THAT(names(), SizeIs(0));
}

TEST_F(open_membership, labels_have_their_bounds) {
  auto request = stranger("a", life_1);
  request.node.labels.assign(17, {});
  for (std::size_t i = 0; i < 17; ++i) request.node.labels[i].key = std::to_string(i);
  EXPECT_EQ(refused(request), errc::invalid_config);
  EXPECT_THAT(why, HasSubstr("17 labels"));
  request.node.labels = {{std::string(65, 'k'), "v"}};
  EXPECT_EQ(refused(request), errc::invalid_config);
  request.node.labels = {{"k", std::string(257, 'v')}};
  EXPECT_EQ(refused(request), errc::invalid_config);
  request.node.labels = {{"", "v"}};
  EXPECT_EQ(refused(request), errc::invalid_config);
  request.node.labels = {{"k", "v"}, {"k", "w"}};
  EXPECT_EQ(refused(request), errc::invalid_config);
  EXPECT_THAT(why, HasSubstr("twice"));
  request.node.labels = {{std::string(64, 'k'), std::string(256, 'v')}};
  EXPECT_TRUE(joins(request));
}

TEST_F(open_membership,
       a_name_of_the_file_is_not_for_strangers_nor_theirs_for_who_says_it_is_named) {
  auto as_named = stranger("a", life_1);
  as_named.join = 0;
  EXPECT_EQ(refused(as_named), errc::not_found);
  EXPECT_THAT(why, HasSubstr("open to others: engines"));
  comes_up(stranger("a", life_2));
  EXPECT_EQ(refused(as_named), errc::not_found) << "nor once the name is there";
}

TEST_F(open_membership, what_a_node_of_the_file_says_of_labels_and_layout_is_not_kept) {
  auto request = request_of(deployment, "store-0", life_1);
  request.node.labels.assign(1000, {"key", "value"});
  request.node.replica_name = "x";
  request.node.fingerprint = llama;
  ASSERT_TRUE(table.registered(request, now));
  const auto seen = table.view().members.at(0).node;
  EXPECT_THAT(seen.labels, SizeIs(0));
  EXPECT_EQ(seen.replica_name, "");
  EXPECT_EQ(seen.fingerprint, kvcache::layout_fingerprint{});
}

TEST_F(open_membership, a_name_that_is_in_use_is_nobody_elses) {
  comes_up(stranger("a", life_1));
  auto other = stranger("a", life_2);
  other.node.port = 5001;
  EXPECT_EQ(refused(other), errc::already_exists);
  EXPECT_THAT(why, HasSubstr("5000"));
}

TEST_F(open_membership, a_new_life_of_a_name_that_is_down_is_let_in_and_the_former_never_again) {
  const auto former = stranger("a", life_1);
  comes_up(former);
  is_lost(former);
  comes_up(stranger("a", life_2));
  EXPECT_EQ(refused(former), errc::stale_incarnation);
}

TEST_F(open_membership, ranks_that_do_not_agree_with_their_replica_are_refused) {
  comes_up(stranger("a", life_1, 0, 2));
  EXPECT_EQ(refused(stranger("a", life_2, 1, 4)), errc::layout_mismatch);
  EXPECT_THAT(why, HasSubstr("4 ranks"));
  EXPECT_THAT(why, HasSubstr("rank 0 says 2"));
  auto other = stranger("a", life_2, 1, 2);
  other.node.fingerprint = mixtral;
  EXPECT_EQ(refused(other), errc::layout_mismatch);
  EXPECT_THAT(why, HasSubstr("0100000000000000"));
  EXPECT_THAT(why, HasSubstr("0200000000000000"));
  comes_up(stranger("a", life_2, 1, 2));
}

TEST_F(open_membership, a_replica_that_is_down_may_come_back_in_another_shape) {
  const auto a0 = stranger("a", life_1, 0, 2);
  const auto a1 = stranger("a", life_2, 1, 2);
  comes_up(a0);
  comes_up(a1);
  is_lost(a0);
  EXPECT_EQ(refused(stranger("a", life_3)), errc::layout_mismatch) << "rank 1 is still there";
  is_lost(a1);
  auto alone = stranger("a", life_3);
  alone.node.fingerprint = mixtral;
  comes_up(alone);
  EXPECT_THAT(names(), ::testing::ElementsAre("engines.a.0"));
  EXPECT_EQ(refused(a1), errc::stale_incarnation) << "its life was forgotten with the shape";
}

TEST_F(open_membership, a_full_stage_refuses_until_a_node_is_down) {
  for (std::uint32_t i = 0; i < 4; ++i) comes_up(stranger("r" + std::to_string(i), 10 + i));
  EXPECT_EQ(refused(stranger("late", life_1)), errc::overloaded);
  EXPECT_THAT(why, HasSubstr("open.max_nodes"));
  is_lost(stranger("r2", 12));
  is_lost(stranger("r1", 11));
  EXPECT_EQ(refused(stranger("late", life_1)), errc::overloaded) << "they may be back in a moment";
  for (int second = 0; second < 6; ++second) {
    beats(stranger("r0", 10));
    beats(stranger("r3", 13));
    pass(milliseconds{1000});
  }
  comes_up(stranger("late", life_1));
  EXPECT_THAT(names(), ::testing::ElementsAre("engines.r0.0", "engines.r1.0", "engines.r3.0",
                                              "engines.late.0"))
      << "the one that was down for longer gave its place";
  EXPECT_EQ(refused(stranger("r2", 12)), errc::stale_incarnation);
}

TEST_F(open_membership, a_node_that_is_down_for_long_is_forgotten_and_refused_in_that_life) {
  const auto a = stranger("a", life_1);
  const auto b = stranger("b", life_2);
  comes_up(a);
  comes_up(b);
  is_lost(a);
  (void)table.take_transitions();
  const auto b_beats_for = [&](minutes time) {
    for (auto left = std::chrono::seconds{time}; left.count() > 0; --left) {
      beats(b);
      pass(milliseconds{1000});
    }
  };
  b_beats_for(minutes{9});
  EXPECT_EQ(table.state_of("engines.a.0"), node_state::down);
  b_beats_for(minutes{2});
  EXPECT_FALSE(table.state_of("engines.a.0"));
  bool told = false;
  for (const auto& change : table.take_transitions()) {
    told =
        told || (change.forgotten && change.name == "engines.a.0" && change.incarnation == life_1);
  }
  EXPECT_TRUE(told);
  heartbeat h;
  h.name = a.node.name;
  h.incarnation = life_1;
  EXPECT_EQ(table.heard(h, now), heartbeat_verdict::unknown);
  EXPECT_EQ(refused(a), errc::stale_incarnation);
  comes_up(stranger("a", life_3));
}

TEST_F(open_membership, a_node_that_reports_a_failure_is_not_forgotten_while_it_is_heard) {
  const auto a = stranger("a", life_1);
  comes_up(a);
  for (int i = 0; i < 12 * 60; ++i) {
    heartbeat h;
    h.name = a.node.name;
    h.incarnation = life_1;
    h.sequence = ++sequence;
    h.failure = "its GPU is lost";
    ASSERT_EQ(table.heard(h, now), heartbeat_verdict::known);
    pass(milliseconds{1000});
  }
  EXPECT_EQ(table.state_of("engines.a.0"), node_state::down);
  ASSERT_TRUE(joins(a));
}

TEST_F(open_membership, a_restarted_supervisor_waits_for_those_who_were_there) {
  auto a = stranger("a", life_1, 1, 2);
  a.node.labels = {{"http", "here"}};
  comes_up(a);
  comes_up(stranger("b", life_2));
  is_lost(stranger("b", life_2));
  const auto text = to_text(table.record());
  const auto left = parse_record(text);
  ASSERT_TRUE(left) << left.error().message;
  EXPECT_EQ(*left, table.record());

  membership_table next{deployment};
  next.restore(*left, now);
  ASSERT_THAT(next.view().members, SizeIs(1));
  const auto seen = next.view().members.at(0);
  EXPECT_EQ(seen.node.name, "engines.a.1");
  EXPECT_EQ(seen.node.replica_name, "a");
  EXPECT_EQ(seen.node.ranks, 2u);
  EXPECT_EQ(seen.node.fingerprint, llama);
  EXPECT_EQ(seen.node.labels, a.node.labels);
  EXPECT_EQ(node_state_from(seen.state), node_state::joining);
  ASSERT_TRUE(next.registered(a, now));
  EXPECT_TRUE(next.registered(stranger("b", life_2), now)) << "its connection may have been cut";
}

TEST_F(open_membership, lives_that_are_over_stay_refused_over_any_number_of_restarts) {
  comes_up(stranger("a", life_1));
  is_lost(stranger("a", life_1));
  comes_up(stranger("a", life_2));
  comes_up(stranger("gone", life_3));
  is_lost(stranger("gone", life_3));
  for (int second = 0; second < 11 * 60; ++second) {
    beats(stranger("a", life_2));
    pass(milliseconds{1000});
  }
  EXPECT_FALSE(table.state_of("engines.gone.0"));
  auto record = parse_record(to_text(table.record())).value();
  for (int restart = 0; restart < 3; ++restart) {
    membership_table next{deployment};
    next.restore(record, now);
    for (const auto& over : {stranger("a", life_1), stranger("gone", life_3)}) {
      const auto refused_again = next.registered(over, now);
      ASSERT_FALSE(refused_again) << over.node.name << " after restart " << restart;
      EXPECT_EQ(refused_again.error().code, errc::stale_incarnation);
    }
    ASSERT_TRUE(next.registered(stranger("a", life_2), now));
    record = parse_record(to_text(next.record())).value();
  }
}

TEST_F(open_membership, nobody_joins_with_the_incarnation_of_another) {
  comes_up(stranger("a", life_1));
  EXPECT_EQ(refused(stranger("b", life_1)), errc::already_exists);
  ASSERT_TRUE(table.registered(request_of(deployment, "store-0", life_2), now));
  EXPECT_EQ(refused(stranger("b", life_2)), errc::already_exists);
}

TEST_F(open_membership, labels_have_a_bound_together) {
  auto request = stranger("a", life_1);
  for (int i = 0; i < 4; ++i) {
    request.node.labels.push_back({"k" + std::to_string(i), std::string(254, 'v')});
  }
  auto fits = request;
  request.node.labels.push_back({"one", "more"});
  EXPECT_EQ(refused(request), errc::invalid_config);
  EXPECT_THAT(why, HasSubstr("1031 bytes"));
  EXPECT_TRUE(joins(fits));
}

TEST_F(open_membership, a_record_of_a_stage_that_is_open_no_more_leaves_nothing_behind) {
  comes_up(stranger("a", life_1));
  auto closed = deployment;
  closed.open.clear();
  membership_table next{closed};
  next.restore(table.record(), now);
  EXPECT_THAT(next.view().members, SizeIs(0));
}

TEST_F(open_membership, only_ranks_of_the_file_can_be_claimed) {
  comes_up(stranger("a", life_1));
  EXPECT_THAT(table.uses(now), SizeIs(1));
}

TEST_F(open_membership, a_replica_drains_with_all_its_ranks) {
  comes_up(stranger("a", life_1, 0, 2));
  comes_up(stranger("a", life_2, 1, 2));
  ASSERT_TRUE(table.drain("engines.a.0"));
  ASSERT_TRUE(table.drain("engines.a.1"));
  const auto serving = table.cancel_drain("engines.a.0", now);
  ASSERT_TRUE(serving);
  EXPECT_THAT(*serving, SizeIs(2));
}

}  // namespace
}  // namespace troupe::actors
