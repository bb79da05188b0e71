// Placements over stages whose nodes no file lists: which nodes fit together, and replicas that
// come and go.

#include <set>

#include "routing_fixture.hpp"

namespace troupe::actors {
namespace {

using std::chrono::milliseconds;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::SizeIs;

constexpr kvcache::layout_fingerprint llama{1};
constexpr kvcache::layout_fingerprint mixtral{2};

struct open_cluster : ::testing::Test {
  router_options options;
  std::optional<router> routes;
  membership members;
  steady_time now{std::chrono::hours{1}};
  int requests{0};

  /// One stage that serves both sides.
  void engines() {
    options.edges = {{"engines", "engines", transfer_mode::read}};
    options.open = {"engines"};
    routes.emplace(options);
  }
  /// A stage for each side.
  void pair() {
    options.edges = {{"prefill", "decode", transfer_mode::write}};
    options.open = {"prefill", "decode"};
    routes.emplace(options);
  }
  void joins(const std::string& stage, std::uint32_t replica, const kvcache::layout_fingerprint& as,
             std::uint32_t rank = 0, std::uint32_t ranks = 1, std::uint64_t life = 1) {
    member& m = members.members.emplace_back();
    m.node.stage = stage;
    m.node.replica = replica;
    m.node.replica_name = "r" + std::to_string(replica);
    m.node.rank = rank;
    m.node.ranks = ranks;
    m.node.name = stage + "." + m.node.replica_name + "." + std::to_string(rank);
    m.node.incarnation = life;
    m.node.fingerprint = as;
    m.state = static_cast<std::uint8_t>(node_state::up);
    tell();
  }
  void is_gone(const std::string& name) {
    std::erase_if(members.members, [&](const member& m) { return m.node.name == name; });
    tell();
  }
  void tell() {
    ++members.epoch;
    routes->update(members, now);
  }
  result<std::variant<placement, ticket_id>> ask(std::uint32_t timeout_ms = 0,
                                                 const std::string& affinity = "") {
    placement_request r;
    r.request = "q" + std::to_string(++requests);
    r.timeout_ms = timeout_ms;
    r.affinity = affinity;
    return routes->place(r, now);
  }
  placement place(const std::string& affinity = "") {
    auto outcome = ask(0, affinity);
    if (outcome && std::holds_alternative<placement>(*outcome))
      return std::get<placement>(*outcome);
    ADD_FAILURE() << (outcome ? "it waits" : outcome.error().message);
    placement none;
    none.prefill.resize(1);
    none.decode.resize(1);
    return none;
  }
};

TEST_F(open_cluster, nobody_is_placed_where_nobody_has_joined) {
  engines();
  const auto outcome = ask();
  ASSERT_FALSE(outcome);
  EXPECT_EQ(outcome.error().code, errc::peer_unreachable);
  EXPECT_THAT(outcome.error().message, HasSubstr("nobody has joined it"));
}

TEST_F(open_cluster, a_replica_is_never_placed_with_itself) {
  engines();
  joins("engines", 0, llama);
  EXPECT_FALSE(ask());
  joins("engines", 1, llama);
  joins("engines", 2, llama);
  for (int i = 0; i < 50; ++i) {
    const auto where = place();
    EXPECT_NE(where.prefill.front().name, where.decode.front().name);
    EXPECT_EQ(where.fingerprint, llama);
  }
}

TEST_F(open_cluster, only_replicas_of_one_layout_are_placed_together) {
  engines();
  joins("engines", 0, llama);
  joins("engines", 1, mixtral);
  const auto outcome = ask();
  ASSERT_FALSE(outcome);
  EXPECT_THAT(outcome.error().message, HasSubstr("have equal layouts"));
  EXPECT_THAT(outcome.error().message, HasSubstr("0100000000"));
  EXPECT_THAT(outcome.error().message, HasSubstr("0200000000"));
  joins("engines", 2, mixtral);
  joins("engines", 3, llama);
  for (int i = 0; i < 50; ++i) {
    const auto where = place();
    EXPECT_EQ(where.prefill.front().fingerprint, where.decode.front().fingerprint);
    EXPECT_NE(where.prefill.front().name, where.decode.front().name);
  }
}

TEST_F(open_cluster, a_prefill_replica_that_nobody_fits_is_passed_over) {
  pair();
  joins("prefill", 0, mixtral);
  joins("prefill", 1, llama);
  joins("decode", 0, llama);
  for (int i = 0; i < 10; ++i) EXPECT_EQ(place().prefill.front().name, "prefill.r1.0");
}

TEST_F(open_cluster, who_does_not_say_its_layout_fits_any) {
  pair();
  joins("prefill", 0, {});
  joins("decode", 0, llama);
  EXPECT_EQ(place().decode.front().name, "decode.r0.0");
}

TEST_F(open_cluster, a_replica_serves_once_all_its_ranks_have_joined) {
  pair();
  joins("decode", 0, llama);
  joins("prefill", 0, llama, 1, 2);
  const auto outcome = ask();
  ASSERT_FALSE(outcome);
  EXPECT_THAT(outcome.error().message, HasSubstr("prefill.r0.0 never registered"));
  joins("prefill", 0, llama, 0, 2);
  const auto where = place();
  ASSERT_THAT(where.prefill, SizeIs(2));
  EXPECT_EQ(where.prefill[0].name, "prefill.r0.0");
  EXPECT_EQ(where.prefill[1].name, "prefill.r0.1");
}

TEST_F(open_cluster, a_request_in_line_is_placed_when_one_joins_that_fits) {
  engines();
  joins("engines", 0, llama);
  joins("engines", 1, mixtral);
  const auto waits = ask(1000);
  ASSERT_TRUE(waits);
  ASSERT_TRUE(std::holds_alternative<ticket_id>(*waits));
  joins("engines", 2, llama);
  const auto served = routes->serve(now);
  ASSERT_THAT(served, SizeIs(1));
  ASSERT_TRUE(served[0].outcome);
  EXPECT_EQ(served[0].outcome->fingerprint, llama);
}

TEST_F(open_cluster, what_ends_late_does_not_count_for_who_took_the_place) {
  pair();
  joins("prefill", 0, llama);
  joins("decode", 0, llama);
  const auto before = place();
  is_gone("decode.r0.0");
  EXPECT_FALSE(ask());
  joins("decode", 1, llama);
  EXPECT_EQ(routes->queue_length("decode", 1), 0u);
  routes->finished(before.request);
  EXPECT_EQ(routes->queue_length("decode", 1), 0u);
  EXPECT_EQ(routes->unfinished("decode", 1), 0u);
  const auto after = place();
  EXPECT_EQ(after.decode.front().name, "decode.r1.0");
  EXPECT_EQ(routes->queue_length("decode", 1), 1u);
}

TEST_F(open_cluster, an_affinity_leaves_a_replica_that_is_gone) {
  pair();
  joins("prefill", 0, llama);
  joins("decode", 0, llama);
  joins("decode", 1, llama);
  const auto first = place("session").decode.front().name;
  for (int i = 0; i < 5; ++i) EXPECT_EQ(place("session").decode.front().name, first);
  is_gone(first);
  joins("decode", 7, llama);  // replaces the one that is gone
  const auto moved = place("session");
  EXPECT_NE(moved.decode.front().name, first);
  EXPECT_THAT(moved.sentence, HasSubstr("affinity 'session' moves"));
}

TEST_F(open_cluster, a_request_that_comes_once_more_stays_with_its_decode_side) {
  pair();
  joins("prefill", 0, mixtral);
  joins("prefill", 1, llama);
  joins("prefill", 2, llama);
  joins("decode", 0, mixtral);
  joins("decode", 1, llama);
  for (int i = 0; i < 10; ++i) {
    const auto first = place();
    placement_request again;
    again.request = first.request;
    again.failed = {first.prefill.front().name};
    const auto outcome = routes->place(again, now);
    ASSERT_TRUE(outcome);
    const auto& second = std::get<placement>(*outcome);
    EXPECT_EQ(second.decode.front().name, first.decode.front().name);
    EXPECT_EQ(second.prefill.front().fingerprint, second.decode.front().fingerprint);
  }
}

TEST_F(open_cluster, a_source_that_would_be_kept_and_fits_nobody_any_more_is_not) {
  for (const auto policy : {placement_policy::round_robin, placement_policy::least_queue_length,
                            placement_policy::random}) {
    options.policies = {{"engines", policy}};
    members = {};
    engines();
    joins("engines", 0, llama);
    joins("engines", 1, llama);
    const auto first = place();
    joins("engines", 2, mixtral);
    joins("engines", 3, mixtral);
    is_gone(first.decode.front().name);
    placement_request again;
    again.request = first.request;
    again.failed = {first.decode.front().name};
    again.keep_source = 1;
    const auto outcome = routes->place(again, now);
    ASSERT_TRUE(outcome) << outcome.error().message;
    EXPECT_EQ(std::get<placement>(*outcome).fingerprint, mixtral);
  }
}

TEST_F(open_cluster, an_affinity_keeps_both_sides_of_a_stage_that_sends_to_itself) {
  engines();
  for (std::uint32_t i = 0; i < 5; ++i) joins("engines", i, llama);
  const auto first = place("session");
  for (int i = 0; i < 10; ++i) {
    (void)place();
    const auto next = place("session");
    EXPECT_EQ(next.prefill.front().name, first.prefill.front().name);
    EXPECT_EQ(next.decode.front().name, first.decode.front().name);
    EXPECT_EQ(next.sentence, "");
  }
}

TEST_F(open_cluster, every_replica_of_a_stage_that_sends_to_itself_takes_its_turn_at_both_sides) {
  engines();
  for (std::uint32_t i = 0; i < 4; ++i) joins("engines", i, llama);
  std::set<std::string> sources, targets;
  for (int i = 0; i < 40; ++i) {
    const auto where = place();
    sources.insert(where.prefill.front().name);
    targets.insert(where.decode.front().name);
  }
  EXPECT_THAT(sources, SizeIs(4));
  EXPECT_THAT(targets, SizeIs(4));
}

TEST_F(open_cluster, replicas_come_and_go_by_the_thousand) {
  engines();
  joins("engines", 0, llama);
  for (std::uint32_t i = 1; i < 2000; ++i) {
    joins("engines", i, llama);
    const auto where = place();
    EXPECT_NE(where.prefill.front().name, where.decode.front().name);
    is_gone("engines.r" + std::to_string(i) + ".0");
  }
  EXPECT_FALSE(ask());
}

}  // namespace
}  // namespace troupe::actors
