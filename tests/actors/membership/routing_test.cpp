// Pairs of replicas of any tensor-parallel sizes, live queue lengths, and any events in any order.

#include <deque>
#include <map>
#include <random>
#include <set>

#include "routing_fixture.hpp"

namespace troupe::actors {
namespace {

using std::chrono::milliseconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::routed_cluster;
using testing::routed_stage;
using testing::routes_of;

// -- pairs

struct sizes {
  std::uint32_t prefill;
  std::uint32_t decode;
};

class pairs : public ::testing::TestWithParam<sizes> {
 protected:
  routed_cluster c{routes_of({2, GetParam().prefill}, {3, GetParam().decode})};
};

TEST_P(pairs, name_every_rank_of_one_replica_of_each_stage_in_rank_order) {
  c.all_up();
  for (int i = 0; i < 6; ++i) {
    const placement p = c.place();
    ASSERT_EQ(p.prefill.size(), GetParam().prefill);
    ASSERT_EQ(p.decode.size(), GetParam().decode);
    for (const auto* side : {&p.prefill, &p.decode}) {
      for (std::uint32_t rank = 0; rank < side->size(); ++rank) {
        const node_info& n = (*side)[rank];
        EXPECT_EQ(n.rank, rank);
        EXPECT_EQ(n.ranks, side->size());
        EXPECT_EQ(n.replica, side->front().replica);
        EXPECT_EQ(n.name, n.stage + "-" + std::to_string(n.replica) + "-" + std::to_string(rank));
      }
    }
  }
}

TEST_P(pairs, leave_out_a_replica_of_which_any_one_rank_is_not_up) {
  for (const expected_slot& slot : c.options.slots) {
    c.all_up();
    c.set(slot.name, node_state::suspect);
    for (int i = 0; i < 6; ++i) {
      const placement p = c.place();
      const auto& side = slot.stage == "prefill" ? p.prefill : p.decode;
      EXPECT_NE(side.front().replica, slot.replica) << slot.name;
    }
  }
}

TEST_P(pairs, leave_out_a_rank_that_the_newest_membership_does_not_name) {
  c.all_up();
  const std::string last = "decode-2-" + std::to_string(GetParam().decode - 1);
  std::erase_if(c.members.members, [&](const member& m) { return m.node.name == last; });
  c.tell();
  EXPECT_THAT(c.decodes(4), ElementsAre(0, 1, 0, 1));
}

TEST_P(pairs, say_which_ranks_are_missing_and_how_long_the_request_waited) {
  c.all_up();
  for (std::uint32_t replica = 0; replica < 3; ++replica) {
    c.note("decode-" + std::to_string(replica) + "-0", node_state::down, 1);
  }
  c.tell();
  ASSERT_TRUE(c.ask("", 1500));
  c.now += milliseconds{1502};
  const auto served = c.routes.serve(c.now);
  ASSERT_EQ(served.size(), 1u);
  ASSERT_FALSE(served[0].outcome);
  EXPECT_EQ(served[0].outcome.error().code, errc::deadline);
  EXPECT_EQ(served[0].outcome.error().message,
            "waited 1502 ms: no replica of stage 'decode' is up (missing: decode-0-0 down, "
            "decode-1-0 down, decode-2-0 down)");
}

INSTANTIATE_TEST_SUITE_P(of, pairs,
                         ::testing::Values(sizes{1, 1}, sizes{2, 2}, sizes{1, 4}, sizes{4, 1},
                                           sizes{2, 8}, sizes{3, 2}),
                         [](const auto& of) {
                           return std::to_string(of.param.prefill) + "_to_" +
                                  std::to_string(of.param.decode);
                         });

// -- live queue lengths

struct queues : ::testing::Test {
  routed_cluster c{routes_of({1, 1}, {3, 2}, placement_policy::least_queue_length)};
};

TEST_F(queues, of_equal_length_are_chosen_in_turn) {
  c.all_up();
  EXPECT_THAT(c.decodes(7), ElementsAre(0, 1, 2, 0, 1, 2, 0));
  for (const char* replica : {"0", "1", "2"}) {
    for (const char* rank : {"-0", "-1"}) c.beat(std::string{"decode-"} + replica + rank, 5);
  }
  EXPECT_THAT(c.decodes(4), ElementsAre(1, 2, 0, 1));
}

TEST_F(queues, do_not_count_a_request_twice_that_one_rank_has_reported_and_another_has_not) {
  c.all_up();
  c.decodes(3);
  c.beat("decode-0-1", 1);
  EXPECT_EQ(c.routes.queue_length("decode", 0), 1u);
  c.beat("decode-0-0", 1);
  EXPECT_EQ(c.routes.queue_length("decode", 0), 1u);
  c.routes.finished("r1");
  EXPECT_EQ(c.routes.queue_length("decode", 0), 0u);
}

TEST_F(queues, of_a_new_life_are_not_shortened_by_what_the_former_one_had) {
  c.all_up();
  EXPECT_EQ(c.decode(), 0u);
  for (const char* rank : {"0", "1"}) {
    c.set(std::string{"decode-0-"} + rank, node_state::down);
    c.set(std::string{"decode-0-"} + rank, node_state::up, 2);
    c.beat(std::string{"decode-0-"} + rank, 5, 2);
  }
  c.routes.finished("r1");
  EXPECT_EQ(c.routes.queue_length("decode", 0), 5u);
}

TEST_F(queues, know_which_requests_of_the_present_life_have_not_ended) {
  c.all_up();
  c.decodes(4);  // r1 and r4 to replica 0
  EXPECT_EQ(c.routes.unfinished("decode", 0), 2u);
  EXPECT_EQ(c.routes.unfinished("decode", 1), 1u);
  EXPECT_EQ(c.routes.unfinished("prefill", 0), 4u);
  EXPECT_EQ(c.routes.unfinished("nowhere", 0) + c.routes.unfinished("decode", 9), 0u);
  c.routes.finished("r4");
  EXPECT_EQ(c.routes.unfinished("decode", 0), 1u);
  c.set("decode-0-1", node_state::up, 2);
  EXPECT_EQ(c.routes.unfinished("decode", 0), 0u) << "what was there ended with it";
}

/// Engines that serve one request each per step, with heartbeats at random times.
class served_equally : public ::testing::TestWithParam<std::uint32_t> {
 protected:
  static constexpr std::uint32_t replicas = 5;
  routed_cluster c{routes_of({1, 1}, {replicas, 1}, placement_policy::least_queue_length)};
  std::mt19937 generator{GetParam()};
  std::vector<std::deque<std::string>> held{replicas};

  std::uint32_t random(std::uint32_t below) {
    return static_cast<std::uint32_t>(generator()) % below;
  }
  void arrive(std::uint32_t n) {
    for (std::uint32_t i = 0; i < n; ++i) {
      const placement p = c.place();
      held[p.decode.front().replica].push_back(p.request);
    }
  }
  void serve_one_each() {
    for (auto& queue : held) {
      if (queue.empty()) continue;
      c.routes.finished(queue.front());
      queue.pop_front();
    }
  }
  void beat(std::uint32_t replica) {
    c.beat("decode-" + std::to_string(replica) + "-0",
           static_cast<std::uint32_t>(held[replica].size()));
  }
  [[nodiscard]] std::size_t spread() const {
    const auto [least, most] = std::ranges::minmax(held, {}, &std::deque<std::string>::size);
    return most.size() - least.size();
  }
};

TEST_P(served_equally, queues_differ_by_one_at_most_whenever_heartbeats_come) {
  c.all_up();
  for (int step = 0; step < 2000; ++step) {
    arrive(random(2 * replicas));
    serve_one_each();
    for (std::uint32_t r = 0; r < replicas; ++r) {
      if (random(7) == 0) beat(r);
    }
    ASSERT_LE(spread(), 1u) << "step " << step;
    for (std::uint32_t r = 0; r < replicas; ++r) {
      ASSERT_EQ(c.routes.queue_length("decode", r), held[r].size()) << "step " << step;
    }
  }
}

TEST_P(served_equally, queues_that_were_far_apart_come_together) {
  c.all_up();
  for (int i = 0; i < 200; ++i) held[0].push_back("elsewhere");
  beat(0);
  arrive(300);
  EXPECT_EQ(held[0].size(), 200u) << "while the others were shorter";
  arrive(600);
  EXPECT_LE(spread(), 1u);
}

INSTANTIATE_TEST_SUITE_P(with_seed, served_equally, ::testing::Range(1u, 9u));

// -- any events in any order

class any_events : public ::testing::TestWithParam<std::uint32_t> {
 protected:
  struct bound_replica {
    std::uint32_t replica{0};
    std::vector<std::uint64_t> incarnations;
  };
  std::mt19937 generator{GetParam()};
  routed_cluster c{options()};
  std::map<std::pair<std::string, std::string>, bound_replica> bound;  ///< by affinity and stage
  std::map<ticket_id, std::string> open;                               ///< affinities of tickets
  std::set<ticket_id> ended;
  std::map<std::string, std::uint64_t> lives;
  bool gave_up{false};  ///< in the last step
  int placed{0}, failed{0}, kept{0};

  std::uint32_t random(std::uint32_t below) {
    return static_cast<std::uint32_t>(generator()) % below;
  }
  [[nodiscard]] static router_options options() {
    const std::uint32_t seed = GetParam();
    auto o =
        routes_of({2, 1 + seed % 2}, {3, 1 + seed % 3}, static_cast<placement_policy>(seed % 3));
    o.ease_in = milliseconds{seed % 4 * 100};
    o.max_waiting = 8;
    return o;
  }
  /// A replica's incarnations in the newest membership. Empty if it is not up.
  [[nodiscard]] std::vector<std::uint64_t> life_of(const std::string& stage,
                                                   std::uint32_t replica) {
    std::vector<std::uint64_t> life;
    for (const expected_slot& slot : c.options.slots) {
      if (slot.stage != stage || slot.replica != replica) continue;
      const member* m = c.find(slot.name);
      if (m == nullptr || node_state_from(m->state) != node_state::up) return {};
      life.push_back(m->node.incarnation);
    }
    return life;
  }
  void check(const std::string& affinity, const std::vector<node_info>& side) {
    ASSERT_FALSE(side.empty());
    const std::string& stage = side.front().stage;
    const auto replica = side.front().replica;
    for (std::uint32_t rank = 0; rank < side.size(); ++rank) {
      ASSERT_EQ(side[rank].rank, rank);
      ASSERT_EQ(side[rank].ranks, side.size());
      ASSERT_EQ(side[rank].replica, replica);
      const member* m = c.find(side[rank].name);
      ASSERT_NE(m, nullptr) << side[rank].name;
      ASSERT_EQ(node_state_from(m->state), node_state::up) << side[rank].name;
      ASSERT_EQ(m->node.incarnation, side[rank].incarnation) << side[rank].name;
    }
    if (affinity.empty()) return;
    const auto known = bound.find({affinity, stage});
    if (known != bound.end()) {
      const bool holds = life_of(stage, known->second.replica) == known->second.incarnations;
      if (holds) {
        ASSERT_EQ(replica, known->second.replica) << affinity << " left a replica that is up";
        ++kept;
      }
    }
    bound[{affinity, stage}] = {replica, life_of(stage, replica)};
  }
  void check(const std::string& affinity, const placement& p) {
    ++placed;
    check(affinity, p.prefill);
    check(affinity, p.decode);
  }
  void change_somebody() {
    const auto& slot = c.options.slots[random(static_cast<std::uint32_t>(c.options.slots.size()))];
    std::uint64_t& life = lives[slot.name];  // no incarnation is used twice
    if (life == 0) life = 1;
    if (random(20) == 0) {
      std::erase_if(c.members.members, [&](const member& n) { return n.node.name == slot.name; });
    } else if (random(3) != 0) {
      life += random(4) == 0 ? 1 : 0;
      c.note(slot.name, node_state::up, life, random(5));
    } else {
      c.note(slot.name, static_cast<node_state>(1 + random(5)), life);
    }
    c.tell();
  }
  void ask() {
    const std::string affinity = random(3) == 0 ? "" : "k" + std::to_string(random(6));
    const auto outcome = c.ask(affinity, random(2) == 0 ? 0 : 1 + random(100));
    if (!outcome) {
      ASSERT_TRUE(outcome.error().code == errc::peer_unreachable ||
                  outcome.error().code == errc::overloaded);
    } else if (const auto* now = std::get_if<placement>(&*outcome)) {
      check(affinity, *now);
    } else {
      ASSERT_TRUE(open.emplace(std::get<ticket_id>(*outcome), affinity).second);
    }
  }
  void end(const std::vector<served_ticket>& served, errc without) {
    for (const served_ticket& s : served) {
      ASSERT_TRUE(ended.insert(s.ticket).second) << "a ticket was served twice";
      const auto it = open.find(s.ticket);
      ASSERT_NE(it, open.end());
      if (s.outcome) {
        check(it->second, *s.outcome);
      } else {
        ++failed;
        ASSERT_EQ(s.outcome.error().code, without);
      }
      open.erase(it);
    }
  }
  void step() {
    gave_up = false;
    switch (random(7)) {
      case 0: change_somebody(); break;
      case 1: {
        const auto& slots = c.options.slots;
        const auto& slot = slots[random(static_cast<std::uint32_t>(slots.size()))];
        const member* m = c.find(slot.name);
        c.beat(slot.name, random(9), m == nullptr ? 1 : m->node.incarnation - random(2));
        break;
      }
      case 2:
        c.routes.finished("r" + std::to_string(random(1 + c.requests)));
        gave_up = true;
        break;
      case 3: c.now += milliseconds{random(40)}; break;
      default: ask(); break;
    }
  }
};

TEST_P(any_events, keep_affinities_while_up_place_on_who_is_up_and_end_every_ticket_once) {
  for (int i = 0; i < 4000; ++i) {
    ASSERT_NO_FATAL_FAILURE(step());
    ASSERT_NO_FATAL_FAILURE(end(c.routes.serve(c.now), gave_up ? errc::aborted : errc::deadline));
    ASSERT_EQ(c.routes.waiting(), open.size());
    ASSERT_LE(open.size(), 8u);
    for (std::uint32_t replica = 0; replica < 3; ++replica) {
      ASSERT_LT(c.routes.queue_length("decode", replica), 10'000u) << "a queue length wrapped";
    }
  }
  ASSERT_NO_FATAL_FAILURE(end(c.routes.abandon(), errc::aborted));
  EXPECT_TRUE(open.empty());
  EXPECT_GT(placed, 100);
  EXPECT_GT(kept, 100);
}

INSTANTIATE_TEST_SUITE_P(with_seed, any_events, ::testing::Range(1u, 25u));

}  // namespace
}  // namespace troupe::actors
