// A replica that comes up empty beside others that serve is eased in, not flooded.

#include <chrono>
#include <cmath>
#include <cstdlib>

#include "routing_fixture.hpp"

namespace troupe::actors {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::routed_cluster;
using testing::routes_of;

router_options eased(placement_policy policy, std::uint32_t ranks = 1) {
  auto o = routes_of({1, 1}, {3, ranks}, policy);
  o.ease_in = seconds{10};
  return o;
}

/// Three decode replicas. The third has not joined yet, the others joined long ago.
class ease_in : public ::testing::TestWithParam<placement_policy> {
 protected:
  routed_cluster c{eased(GetParam())};

  void settle() {
    for (const char* name : {"prefill-0-0", "decode-0-0", "decode-1-0"}) {
      c.note(name, node_state::up, 1);
    }
    c.tell();
    c.now += seconds{60};
    (void)c.routes.take_notes();
  }
};

TEST_P(ease_in, holds_nobody_back_where_all_are_new) {
  c.all_up();
  EXPECT_THAT(c.routes.take_notes(), IsEmpty());
  for (std::uint32_t replica : {0u, 1u, 2u}) EXPECT_NEAR(c.taken_of(3000, replica), 1000, 120);
}

TEST_P(ease_in, holds_nobody_back_who_starts_a_moment_after_the_first) {
  settle();
  routed_cluster fresh{eased(GetParam())};
  c.routes = std::move(fresh.routes);
  c.tell();
  c.now += milliseconds{500};
  c.set("decode-2-0", node_state::up);
  EXPECT_THAT(c.routes.take_notes(), IsEmpty());
  EXPECT_NEAR(c.taken_of(3000, 2), 1000, 120);
}

TEST_P(ease_in, holds_nobody_back_who_served_the_supervisor_before_this_one) {
  constexpr std::uint64_t before = 1000;
  c.routes.remember(before);
  const auto comes = [&](const char* name, std::uint64_t registered) {
    c.note(name, node_state::up, 1);
    c.find(name)->registered = registered;
    c.tell();
  };
  comes("prefill-0-0", 3);
  comes("decode-0-0", 7);
  c.now += seconds{4};
  comes("decode-1-0", before);
  EXPECT_THAT(c.routes.take_notes(), IsEmpty());
  for (std::uint32_t replica : {0u, 1u}) EXPECT_NEAR(c.taken_of(3000, replica), 1500, 120);
  comes("decode-2-0", before + 1);
  EXPECT_THAT(c.routes.take_notes(), ElementsAre(HasSubstr("replica 2 of stage decode is new")));
  EXPECT_EQ(c.taken_of(3000, 2), 0) << "a life that began since is eased in as ever";
}

TEST_P(ease_in, gives_a_newcomer_a_share_that_grows_from_nothing_to_the_whole) {
  settle();
  c.set("decode-2-0", node_state::up);
  EXPECT_THAT(c.routes.take_notes(),
              ElementsAre("replica 2 of stage decode is new beside others: its share of the "
                          "requests grows over 10000 ms, from 0 %"));
  EXPECT_EQ(c.taken_of(3000, 2), 0);
  for (int tenths : {1, 3, 5, 7, 9}) {
    c.now += milliseconds{tenths == 1 ? 1000 : 2000};
    const double share = tenths / 10.0;
    EXPECT_NEAR(c.taken_of(3000, 2), 3000 * share / (2 + share), 120) << tenths;
  }
  c.now += seconds{1};
  EXPECT_NEAR(c.taken_of(3000, 2), 1000, 120);
  c.now += seconds{100};
  EXPECT_NEAR(c.taken_of(3000, 2), 1000, 120);
}

TEST_P(ease_in, lets_the_only_one_that_is_up_serve_everything) {
  settle();
  c.note("decode-0-0", node_state::down, 1);
  c.note("decode-1-0", node_state::suspect, 1);
  c.note("decode-2-0", node_state::up, 1);
  c.tell();
  EXPECT_EQ(c.taken_of(100, 2), 100);
}

TEST_P(ease_in, lets_the_second_of_two_newcomers_follow_the_first) {
  settle();
  c.set("decode-0-0", node_state::up, 2);
  c.now += seconds{5};
  c.set("decode-2-0", node_state::up, 1);
  c.set("decode-1-0", node_state::down, 1);
  // Eased in for 5 s and 0 s of 10 s: the others have one and a half shares.
  EXPECT_NEAR(c.taken_of(3000, 2), 1000, 120);
}

TEST_P(ease_in, does_not_begin_anew_for_a_replica_that_kept_its_cache) {
  settle();
  c.set("decode-2-0", node_state::up);
  c.now += seconds{20};
  (void)c.routes.take_notes();
  for (const node_state away : {node_state::suspect, node_state::down, node_state::joining}) {
    c.set("decode-2-0", away);
    c.set("decode-2-0", node_state::up);
    EXPECT_THAT(c.routes.take_notes(), IsEmpty()) << to_string(away);
    EXPECT_NEAR(c.taken_of(3000, 2), 1000, 120) << to_string(away);
  }
}

TEST_P(ease_in, goes_on_where_it_was_after_a_moment_as_suspect) {
  settle();
  c.set("decode-2-0", node_state::up);
  c.now += seconds{2};
  c.set("decode-2-0", node_state::suspect);
  c.now += seconds{3};
  c.set("decode-2-0", node_state::up);
  EXPECT_NEAR(c.taken_of(3000, 2), 3000 * 0.5 / 2.5, 120);
}

TEST_P(ease_in, begins_anew_for_a_new_life) {
  settle();
  c.set("decode-2-0", node_state::up);
  c.now += seconds{20};
  c.set("decode-2-0", node_state::up, 2);
  EXPECT_EQ(c.taken_of(3000, 2), 0);
}

TEST_P(ease_in, of_nothing_eases_nobody_in) {
  auto o = eased(GetParam());
  o.ease_in = seconds{0};
  c.routes = router{o};
  settle();
  c.set("decode-2-0", node_state::up);
  EXPECT_THAT(c.routes.take_notes(), IsEmpty());
  EXPECT_NEAR(c.taken_of(3000, 2), 1000, 120);
}

TEST_P(ease_in, begins_anew_for_a_replica_of_which_one_rank_has_a_new_life) {
  routed_cluster wide{eased(GetParam(), 2)};
  wide.all_up();
  wide.now += seconds{60};
  wide.set("decode-1-1", node_state::down);
  wide.set("decode-1-1", node_state::joining, 2);
  wide.set("decode-1-1", node_state::up, 2);
  EXPECT_THAT(wide.routes.take_notes(), ElementsAre(HasSubstr("replica 1 of stage decode is new")));
  EXPECT_EQ(wide.taken_of(300, 1), 0);
}

INSTANTIATE_TEST_SUITE_P(by, ease_in, testing::every_policy(), testing::policy_name);

// -- an empty queue attracts

struct empty_newcomer : ::testing::Test {
  routed_cluster c{eased(placement_policy::least_queue_length)};

  void load_the_others(std::uint32_t queue) {
    for (const char* name : {"prefill-0-0", "decode-0-0", "decode-1-0"}) {
      c.note(name, node_state::up, 1, queue);
    }
    c.tell();
    c.now += seconds{60};
    c.set("decode-2-0", node_state::up);
  }
};

TEST_F(empty_newcomer, beside_long_queues_does_not_attract_every_request) {
  load_the_others(100);
  c.decodes(30);
  EXPECT_EQ(c.routes.queue_length("decode", 2), 0u);
  c.now += seconds{1};
  c.decodes(60);
  EXPECT_NEAR(static_cast<double>(c.routes.queue_length("decode", 2)), 14, 2)
      << "a tenth of the others' mean";
  c.now += seconds{9};
  c.decodes(400);
  EXPECT_NEAR(static_cast<double>(c.routes.queue_length("decode", 2)), 230, 2) << "a third of 690";
}

TEST_F(empty_newcomer, has_a_queue_that_grows_with_its_share_while_requests_come_and_go) {
  load_the_others(40);
  std::vector<std::uint32_t> queues{40, 40, 0};
  for (int ms = 0; ms < 20'000; ms += 10) {
    c.now += milliseconds{10};
    for (int i = 0; i < 3; ++i) ++queues[c.decode()];
    for (std::uint32_t r = 0; r < 3; ++r) {  // each serves one request and reports it
      if (queues[r] > 0) --queues[r];
      c.beat("decode-" + std::to_string(r) + "-0", queues[r]);
    }
    const double others = (queues[0] + queues[1]) / 2.0;
    const double share = std::min(1.0, ms / 10'000.0);
    ASSERT_LE(queues[2], others * share + 3) << "after " << ms << " ms";
  }
  EXPECT_NEAR(queues[2], (queues[0] + queues[1]) / 2.0, 3);
}

TEST_F(empty_newcomer, beside_one_long_queue_takes_its_part_of_the_mean) {
  load_the_others(0);
  c.beat("decode-0-0", 1000);
  c.now += seconds{5};
  c.decodes(30);
  EXPECT_EQ(c.routes.queue_length("decode", 2), 0u) << "the idle one is the shortest by far";
  EXPECT_EQ(c.routes.queue_length("decode", 1), 30u);
}

}  // namespace
}  // namespace troupe::actors
