// Requests with the same affinity stay together while their replicas are up, and no longer.

#include "routing_fixture.hpp"

namespace troupe::actors {
namespace {

using ::testing::HasSubstr;
using testing::routed_cluster;
using testing::routes_of;

class affinity : public ::testing::TestWithParam<placement_policy> {
 protected:
  routed_cluster c{routes_of({2, 1}, {3, 2}, GetParam())};
};

TEST_P(affinity, keeps_a_request_and_its_companions_together_in_every_stage) {
  c.all_up();
  const placement first = c.place("conversation");
  EXPECT_EQ(first.sentence, "");
  const auto prefill = first.prefill.front().replica;
  const auto decode = first.decode.front().replica;
  for (int i = 0; i < 50; ++i) {
    c.decodes(i % 3);                                        // others follow the policy
    c.beat("decode-" + std::to_string(decode) + "-0", 100);  // this replica has the longest queue
    const placement next = c.place("conversation");
    ASSERT_EQ(next.prefill.front().replica, prefill);
    ASSERT_EQ(next.decode.front().replica, decode);
    ASSERT_EQ(next.sentence, "");
  }
}

TEST_P(affinity, leaves_a_replica_of_which_one_rank_is_not_up_and_does_not_go_back) {
  for (const node_state gone :
       {node_state::suspect, node_state::down, node_state::leaving, node_state::joining}) {
    c.all_up();
    const auto before = c.decode("k");
    c.set("decode-" + std::to_string(before) + "-1", gone);
    const placement moved = c.place("k");
    const auto after = moved.decode.front().replica;
    EXPECT_NE(after, before) << to_string(gone);
    EXPECT_EQ(moved.sentence, "affinity 'k' moves in stage decode from replica " +
                                  std::to_string(before) + " (decode-" + std::to_string(before) +
                                  "-1 " + std::string{to_string(gone)} + ") to replica " +
                                  std::to_string(after));
    c.all_up();
    const placement next = c.place("k");
    EXPECT_EQ(next.decode.front().replica, after);
    EXPECT_EQ(next.sentence, "");
  }
}

TEST_P(affinity, is_dropped_in_the_stage_that_lost_its_replica_and_kept_in_the_other) {
  c.all_up();
  const placement before = c.place("k");
  c.set(before.decode.front().name, node_state::down);
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(c.place("k").prefill.front().replica, before.prefill.front().replica);
  }
}

TEST_P(affinity, does_not_count_a_replica_that_was_away_unnoticed_in_one_and_the_same_life) {
  c.all_up();
  const placement before = c.place("k");
  c.set(before.decode.front().name, node_state::down);
  c.set(before.decode.front().name, node_state::up);
  const placement next = c.place("k");
  EXPECT_EQ(next.decode.front().name, before.decode.front().name);
  EXPECT_EQ(next.sentence, "");
}

TEST_P(affinity, of_a_replica_whose_rank_has_restarted_is_dropped_since_its_cache_is_gone) {
  c.all_up();
  const auto before = c.decode("k");
  c.set("decode-" + std::to_string(before) + "-1", node_state::up, 2);
  const placement next = c.place("k");
  EXPECT_THAT(next.sentence, HasSubstr("in stage decode from replica " + std::to_string(before) +
                                       " (restarted) to"));
  const auto bound = next.decode.front().replica;
  for (int i = 0; i < 5; ++i) EXPECT_EQ(c.decode("k"), bound);
}

TEST_P(affinity, holds_for_a_request_that_had_to_wait) {
  c.all_up();
  const placement before = c.place("k");
  c.note("prefill-0-0", node_state::down, 1);
  c.note("prefill-1-0", node_state::down, 1);
  c.tell();
  ASSERT_TRUE(std::holds_alternative<ticket_id>(*c.ask("k", 1000)));
  c.all_up();
  const auto served = c.routes.serve(c.now);
  ASSERT_EQ(served.size(), 1u);
  ASSERT_TRUE(served[0].outcome);
  EXPECT_EQ(served[0].outcome->decode.front().name, before.decode.front().name);
}

INSTANTIATE_TEST_SUITE_P(of, affinity, testing::every_policy(), testing::policy_name);

TEST(affinities, spread_by_the_policy_and_their_requests_count_in_the_queues) {
  routed_cluster c{routes_of({1, 1}, {3, 1}, placement_policy::least_queue_length)};
  c.all_up();
  EXPECT_EQ(c.decode("a"), 0u);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(c.decode("a"), 0u);
  EXPECT_EQ(c.routes.queue_length("decode", 0), 5u);
  EXPECT_EQ(c.decode("b"), 1u);
  EXPECT_EQ(c.decode("c"), 2u);
  EXPECT_EQ(c.decode("d"), 1u) << "the shortest queues, in turn";
}

TEST(affinities, that_were_not_asked_for_the_longest_are_forgotten_beyond_the_bound) {
  auto o = routes_of({1, 1}, {4, 1});
  o.max_affinities = 3;
  routed_cluster c{o};
  c.all_up();
  EXPECT_EQ(c.decode("a"), 0u);
  EXPECT_EQ(c.decode("b"), 1u);
  EXPECT_EQ(c.decode("c"), 2u);
  EXPECT_EQ(c.decode("a"), 0u);
  EXPECT_EQ(c.decode("d"), 3u);  // `b` is forgotten
  EXPECT_EQ(c.decode("a"), 0u);
  EXPECT_EQ(c.decode("c"), 2u);
  EXPECT_EQ(c.decode("b"), 0u) << "b is new again, and the round goes on";
  for (int i = 0; i < 100; ++i) {
    c.decode("k" + std::to_string(i));
    ASSERT_LE(c.routes.affinities(), 3u);
  }
}

TEST(affinities, of_no_table_at_all_are_placed_by_the_policy) {
  auto o = routes_of({1, 1}, {2, 1});
  o.max_affinities = 0;
  routed_cluster c{o};
  c.all_up();
  EXPECT_EQ(c.decode("a"), 0u);
  EXPECT_EQ(c.decode("a"), 1u);
}

TEST(affinities, longer_than_256_bytes_are_refused_by_name) {
  routed_cluster c{routes_of({1, 1}, {1, 1})};
  c.all_up();
  EXPECT_TRUE(c.ask(std::string(256, 'x')));
  const auto outcome = c.ask("session-" + std::string(249, 'x'), 1000);
  ASSERT_FALSE(outcome);
  EXPECT_EQ(outcome.error().code, errc::invalid_config);
  EXPECT_THAT(outcome.error().message,
              HasSubstr("an affinity has at most 256 bytes, that of request 'r2' has 257: "
                        "'session-xxx"));
  EXPECT_EQ(c.routes.affinities(), 1u);
}

TEST(affinities, survive_the_move_of_the_router_that_knows_them) {
  routed_cluster c{routes_of({1, 1}, {4, 1})};
  c.all_up();
  for (int i = 0; i < 20; ++i) c.decode("k" + std::to_string(i));
  router moved = std::move(c.routes);
  c.routes = std::move(moved);
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(c.decode("k" + std::to_string(i)), static_cast<std::uint32_t>(i % 4));
  }
}

}  // namespace
}  // namespace troupe::actors
