#include "troupe/actors/membership/router.hpp"

#include <random>
#include <set>

#include "fails_with.hpp"
#include "routing_fixture.hpp"

namespace troupe::actors {
namespace {

using std::chrono::milliseconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using troupe::testing::fails_with;

/// Two prefill replicas of one rank, three decode replicas of two ranks, one edge.
router_options demo_routes(placement_policy decode = placement_policy::round_robin) {
  auto o = testing::routes_of({2, 1}, {3, 2});
  o.policies["decode"] = decode;
  return o;
}

struct router_of_a_cluster : ::testing::Test, testing::routed_cluster {
  router_of_a_cluster() : routed_cluster{demo_routes()} {}

  /// One after the other.
  void all_up() {
    for (const expected_slot& slot : options.slots) set(slot.name, node_state::up);
  }
  auto ask(std::uint32_t timeout_ms = 0, const std::string& from = "", const std::string& to = "") {
    placement_request r;
    r.request = "r" + std::to_string(++requests);
    r.from = from;
    r.to = to;
    r.timeout_ms = timeout_ms;
    return routes.place(r, now);
  }
};

TEST_F(router_of_a_cluster, a_placement_names_every_rank_of_both_replicas_in_rank_order) {
  all_up();
  const auto outcome = ask();
  ASSERT_TRUE(outcome);
  const auto& p = std::get<placement>(*outcome);
  EXPECT_EQ(p.failed, 0);
  EXPECT_EQ(p.request, "r1");
  EXPECT_EQ(p.mode, transfer_mode::write);
  EXPECT_EQ(p.epoch, members.epoch);
  ASSERT_EQ(p.prefill.size(), 1u);
  ASSERT_EQ(p.decode.size(), 2u);
  EXPECT_EQ(p.prefill[0].name, "prefill-0-0");
  EXPECT_EQ(p.decode[0].name, "decode-0-0");
  EXPECT_EQ(p.decode[1].name, "decode-0-1");
  EXPECT_EQ(p.decode[1].incarnation, 1u);
}

TEST_F(router_of_a_cluster, round_robin_goes_round_and_leaves_out_who_is_not_up) {
  all_up();
  EXPECT_THAT(decodes(4), ElementsAre(0, 1, 2, 0));
  set("decode-1-1", node_state::suspect);
  EXPECT_THAT(decodes(3), ElementsAre(2, 0, 2)) << "one rank is enough to leave a replica out";
  set("decode-1-1", node_state::up);
  EXPECT_THAT(decodes(3), ElementsAre(0, 1, 2));
}

TEST_F(router_of_a_cluster, least_queue_length_counts_the_last_heartbeat_and_placements_since) {
  routes = router{demo_routes(placement_policy::least_queue_length)};
  all_up();
  beat("decode-0-0", 4);
  beat("decode-1-0", 1);
  beat("decode-2-0", 3);
  EXPECT_THAT(decodes(2), ElementsAre(1, 1));
  EXPECT_EQ(routes.queue_length("decode", 1), 3u);
  beat("decode-1-0", 7);
  EXPECT_THAT(decodes(3), ElementsAre(2, 0, 2)) << "equally long ones take turns";
  beat("decode-0-1", 50);
  beat("decode-2-0", 9);
  EXPECT_EQ(decode(), 1u) << "a replica is as busy as its busiest rank";
}

TEST_F(router_of_a_cluster, idle_replicas_share_evenly_between_two_heartbeats) {
  routes = router{demo_routes(placement_policy::least_queue_length)};
  all_up();
  decodes(30);
  for (std::uint32_t replica : {0u, 1u, 2u}) EXPECT_EQ(routes.queue_length("decode", replica), 10u);
}

TEST_F(router_of_a_cluster,
       a_finished_request_leaves_the_queue_whether_or_not_a_heartbeat_counted_it) {
  routes = router{demo_routes(placement_policy::least_queue_length)};
  all_up();
  decodes(3);  // r1 -> 0, r2 -> 1, r3 -> 2
  routes.finished("r1");
  EXPECT_EQ(routes.queue_length("decode", 0), 0u);
  routes.finished("r1");
  EXPECT_EQ(routes.queue_length("decode", 0), 0u) << "twice is once";
  beat("decode-1-0", 1);
  EXPECT_EQ(routes.queue_length("decode", 1), 1u);
  routes.finished("r2");
  EXPECT_EQ(routes.queue_length("decode", 1), 0u);
  routes.finished("who-is-that");
  EXPECT_EQ(routes.tracked(), 1u);
}

TEST_F(router_of_a_cluster, a_new_life_of_a_node_does_not_inherit_a_queue) {
  routes = router{demo_routes(placement_policy::least_queue_length)};
  all_up();
  beat("decode-0-0", 8);
  set("decode-0-0", node_state::down, 1, 8);
  set("decode-0-0", node_state::up, 2, 0);
  EXPECT_EQ(routes.queue_length("decode", 0), 0u);
  beat("decode-0-0", 100, 1);
  EXPECT_EQ(routes.queue_length("decode", 0), 0u) << "a former life's load is ignored";
}

TEST_F(router_of_a_cluster, random_reaches_every_replica_and_repeats_from_its_seed) {
  const auto draw = [&] {
    routes = router{demo_routes(placement_policy::random)};
    all_up();
    return decodes(200);
  };
  const auto first = draw();
  EXPECT_EQ(first, draw());
  EXPECT_EQ(std::set(first.begin(), first.end()), (std::set<std::uint32_t>{0, 1, 2}));
}

// -- no node up

TEST_F(router_of_a_cluster, says_which_stage_has_nobody_up_and_who_is_missing) {
  set("prefill-1-0", node_state::up);
  set("decode-0-0", node_state::up);
  set("decode-0-1", node_state::down);
  set("decode-1-0", node_state::joining);
  const auto outcome = ask();
  ASSERT_FALSE(outcome);
  EXPECT_EQ(outcome.error().code, errc::peer_unreachable);
  EXPECT_EQ(outcome.error().message,
            "no replica of stage 'decode' is up (missing: decode-0-1 down, decode-1-0 joining, "
            "decode-1-1 never registered, decode-2-0 never registered, decode-2-1 never "
            "registered); start them, or give the request time to wait");
}

TEST_F(router_of_a_cluster, names_both_stages_when_both_are_missing) {
  const auto outcome = ask();
  ASSERT_FALSE(outcome);
  EXPECT_THAT(outcome.error().message, HasSubstr("stage 'prefill' is up (missing: prefill-0-0"));
  EXPECT_THAT(outcome.error().message, HasSubstr("; no replica of stage 'decode' is up"));
}

TEST_F(router_of_a_cluster, requests_wait_in_arrival_order_until_somebody_is_up) {
  const auto first = std::get<ticket_id>(*ask(1000));
  const auto second = std::get<ticket_id>(*ask(1000));
  EXPECT_TRUE(routes.serve(now).empty());
  all_up();
  const auto served = routes.serve(now);
  ASSERT_EQ(served.size(), 2u);
  EXPECT_EQ(served[0].ticket, first);
  EXPECT_EQ(served[1].ticket, second);
  ASSERT_TRUE(served[0].outcome);
  EXPECT_EQ(served[0].outcome->request, "r1");
  EXPECT_EQ(served[0].outcome->decode[0].replica, 0u);
  EXPECT_EQ(served[1].outcome->decode[0].replica, 1u);
  EXPECT_EQ(routes.waiting(), 0u);
}

TEST_F(router_of_a_cluster, a_wait_ends_at_its_own_deadline) {
  (void)ask(1000);
  (void)ask(300);
  now += milliseconds{299};
  EXPECT_TRUE(routes.serve(now).empty());
  now += milliseconds{1};
  const auto served = routes.serve(now);
  ASSERT_EQ(served.size(), 1u);
  ASSERT_FALSE(served[0].outcome);
  EXPECT_EQ(served[0].outcome.error().code, errc::deadline);
  EXPECT_THAT(served[0].outcome.error().message, HasSubstr("waited 300 ms: no replica of stage"));
  EXPECT_EQ(routes.waiting(), 1u);
}

TEST_F(router_of_a_cluster, a_request_that_ends_while_it_waits_gets_no_place) {
  const auto first = std::get<ticket_id>(*ask(1000));
  const auto second = std::get<ticket_id>(*ask(1000));
  routes.finished("r1");
  all_up();
  const auto served = routes.serve(now);
  ASSERT_EQ(served.size(), 2u);
  EXPECT_EQ(served[0].ticket, first);
  ASSERT_FALSE(served[0].outcome);
  EXPECT_EQ(served[0].outcome.error().code, errc::aborted);
  EXPECT_EQ(served[1].ticket, second);
  ASSERT_TRUE(served[1].outcome);
  EXPECT_EQ(served[1].outcome->decode[0].replica, 0u) << "nothing was counted for the first";
}

TEST_F(router_of_a_cluster, the_line_is_bounded) {
  auto o = demo_routes();
  o.max_waiting = 2;
  routes = router{o};
  EXPECT_TRUE(ask(1000));
  EXPECT_TRUE(ask(1000));
  const auto third = ask(1000);
  ASSERT_THAT(third, fails_with(errc::overloaded, HasSubstr("2 requests wait already")));
}

TEST_F(router_of_a_cluster, a_router_that_stops_leaves_nobody_waiting) {
  (void)ask(1000);
  (void)ask(1000);
  const auto served = routes.abandon();
  ASSERT_EQ(served.size(), 2u);
  EXPECT_EQ(served[0].outcome.error().code, errc::aborted);
  EXPECT_EQ(routes.waiting(), 0u);
}

// -- edges

TEST_F(router_of_a_cluster, refuses_an_edge_that_the_deployment_does_not_have) {
  all_up();
  const auto outcome = ask(0, "decode", "prefill");
  ASSERT_FALSE(outcome);
  EXPECT_EQ(outcome.error().code, errc::not_found);
  EXPECT_EQ(outcome.error().message,
            "the deployment has no edge from stage 'decode' to stage 'prefill'; its edges are "
            "prefill -> decode");
}

TEST_F(router_of_a_cluster, asks_for_both_stages_when_more_than_one_edge_fits) {
  auto o = demo_routes();
  o.edges.push_back({"decode", "prefill", transfer_mode::read});
  routes = router{o};
  all_up();
  const auto outcome = ask();
  ASSERT_THAT(outcome,
              fails_with(errc::invalid_config, HasSubstr("prefill -> decode, decode -> prefill")));
  const auto named = ask(0, "decode", "");
  ASSERT_TRUE(named);
  EXPECT_EQ(std::get<placement>(*named).mode, transfer_mode::read);
}

TEST_F(router_of_a_cluster, a_deployment_without_edges_or_nodes_says_so) {
  routes = router{router_options{}};
  EXPECT_THAT(ask().error().message, HasSubstr("it has no edges"));
  router_options o;
  o.edges = {{"a", "b", transfer_mode::write}};
  routes = router{o};
  EXPECT_THAT(ask().error().message, HasSubstr("the deployment gives it no nodes"));
}

TEST_F(router_of_a_cluster, an_endless_request_id_is_refused) {
  all_up();
  placement_request r;
  r.request.assign(1 << 20, 'x');
  const auto outcome = routes.place(r, now);
  ASSERT_FALSE(outcome);
  EXPECT_EQ(outcome.error().code, errc::invalid_config);
}

TEST_F(router_of_a_cluster, an_endless_list_of_nodes_that_failed_is_refused) {
  all_up();
  placement_request r;
  r.request = "r";
  for (const auto& failed : {std::vector<std::string>(100'000, "decode-0"),
                             std::vector<std::string>{std::string(1 << 20, 'x')}}) {
    r.failed = failed;
    const auto outcome = routes.place(r, now);
    ASSERT_THAT(outcome, fails_with(errc::invalid_config, HasSubstr("that failed it")));
  }
}

TEST_F(router_of_a_cluster, remembers_a_bounded_number_of_placed_requests) {
  auto o = demo_routes();
  o.max_tracked = 10;
  routes = router{o};
  all_up();
  for (int i = 0; i < 100; ++i) {
    decode();
    if (i % 3 == 0) routes.finished("r" + std::to_string(i));
    ASSERT_LE(routes.tracked(), 10u);
  }
}

// -- any events in any order

struct any_routing : router_of_a_cluster, ::testing::WithParamInterface<std::uint32_t> {};

TEST_P(any_routing, never_places_on_a_node_that_is_not_up_and_serves_every_ticket_once) {
  std::mt19937 generator{GetParam()};
  const auto random = [&] { return static_cast<std::uint32_t>(generator()); };
  auto o = demo_routes(GetParam() % 3 == 0   ? placement_policy::random
                       : GetParam() % 3 == 1 ? placement_policy::least_queue_length
                                             : placement_policy::round_robin);
  o.max_waiting = 8;
  routes = router{o};
  std::map<ticket_id, steady_time> open;
  const auto check = [&](const placement& p) {
    ASSERT_EQ(p.prefill.size(), 1u);
    ASSERT_EQ(p.decode.size(), 2u);
    ASSERT_EQ(p.decode[0].replica, p.decode[1].replica);
    for (const auto* side : {&p.prefill, &p.decode}) {
      for (std::size_t rank = 0; rank < side->size(); ++rank) {
        const node_info& n = (*side)[rank];
        ASSERT_EQ(n.rank, rank);
        const auto* it = find(n.name);
        ASSERT_NE(it, nullptr);
        ASSERT_EQ(node_state_from(it->state), node_state::up) << n.name;
        ASSERT_EQ(it->node.incarnation, n.incarnation) << n.name;
      }
    }
  };
  for (int step = 0; step < 3000; ++step) {
    auto without = errc::deadline;
    switch (random() % 6) {
      case 0:
      case 1: {
        const auto& slot = o.slots[random() % o.slots.size()];
        const bool rises = random() % 3 != 0;
        set(slot.name, rises ? node_state::up : static_cast<node_state>(1 + random() % 5),
            1 + random() % 3, random() % 5);
        break;
      }
      case 2: beat(o.slots[random() % o.slots.size()].name, random() % 9, 1 + random() % 3); break;
      case 3:
        routes.finished("r" + std::to_string(random() % static_cast<std::uint32_t>(requests + 1)));
        without = errc::aborted;
        break;
      case 4: now += milliseconds{random() % 40}; break;
      default: {
        const auto outcome = ask(random() % 2 == 0 ? 0 : 1 + random() % 100);
        if (!outcome) {
          ASSERT_TRUE(outcome.error().code == errc::peer_unreachable ||
                      outcome.error().code == errc::overloaded);
        } else if (std::holds_alternative<placement>(*outcome)) {
          check(std::get<placement>(*outcome));
        } else {
          ASSERT_TRUE(open.emplace(std::get<ticket_id>(*outcome), now).second);
        }
        break;
      }
    }
    for (const served_ticket& s : routes.serve(now)) {
      ASSERT_EQ(open.erase(s.ticket), 1u) << "a ticket was served twice";
      if (s.outcome) {
        check(*s.outcome);
      } else {
        ASSERT_EQ(s.outcome.error().code, without);
      }
    }
    ASSERT_EQ(open.size(), routes.waiting());
    for (const auto& [ticket, asked] : open) ASSERT_LT(now - asked, milliseconds{100});
    for (std::uint32_t replica = 0; replica < 3; ++replica) {
      ASSERT_LT(routes.queue_length("decode", replica), 10000u) << "a queue length wrapped";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(router, any_routing, ::testing::Range(1u, 16u));

}  // namespace
}  // namespace troupe::actors
