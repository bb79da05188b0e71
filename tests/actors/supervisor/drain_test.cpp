// A drain over real sockets: the supervisor with simulated nodes, and with an engine.

#include <array>
#include <thread>

#include <caf/scoped_actor.hpp>
#include <gmock/gmock.h>

#include "troupe/actors/cluster_client.hpp"
#include "troupe/actors/engine.hpp"
#include "troupe/actors/supervisor/supervisor.hpp"
#include "troupe/config/parse.hpp"

#include "cluster_peer.hpp"
#include "waiting.hpp"

namespace troupe::actors::testing {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;
using troupe::testing::comes_true;
using troupe::testing::wait_limit;

/// The deadline of a drain, longer than any wait.
constexpr std::uint32_t long_after = 3'600'000;

/// A supervisor that can be restarted on its port, and a client of it.
struct drained_cluster : ::testing::Test {
  std::unique_ptr<actor_host> there;
  std::unique_ptr<cluster_client> client;
  std::uint16_t port{0};

  void start(const supervisor_options& options) {
    client.reset();
    there.reset();
    there = std::make_unique<actor_host>();
    const auto bound =
        there->publish(spawn_supervisor(there->system(), options), "127.0.0.1", port);
    ASSERT_TRUE(bound) << bound.error().message;
    port = *bound;
    auto made = cluster_client::connect({.host = "127.0.0.1", .port = port, .timeout = wait_limit});
    ASSERT_TRUE(made) << made.error().message;
    client = std::move(*made);
  }
  std::optional<member> seen(const std::string& name) {
    const auto all = client->members();
    if (!all) return std::nullopt;
    const auto found =
        std::ranges::find(all->members, name, [](const member& m) { return m.node.name; });
    return found == all->members.end() ? std::nullopt : std::optional{*found};
  }
  bool becomes(const std::string& name, node_state wanted) {
    return comes_true(
        [&] {
          const auto m = seen(name);
          return m && node_state_from(m->state) == wanted;
        },
        milliseconds{5});
  }
  std::string reason(const std::string& name) { return seen(name).value_or(member{}).reason; }
  std::string refusal(const std::string& name, std::uint32_t deadline_ms = long_after) {
    const auto asked = client->drain({name, deadline_ms});
    return asked ? "none" : to_string(asked.error());
  }
};

/// Nodes simulated by the test.
struct drain_of_nodes : drained_cluster {
  std::unique_ptr<actor_host> here = std::make_unique<actor_host>();
  supervisor_actor supervisor;
  std::uint64_t sequence{0};

  /// One prefill node, a decode replica of two ranks, and another of one rank.
  static supervisor_options ranks() {
    auto options = three_nodes();
    auto& slots = options.members.slots;
    slots[1].ranks = 2;
    slots.push_back({"decode-0-1", "decode", node_role::decode, 0, 1, 2});
    return options;
  }
  void SetUp() override {
    start(ranks());
    auto found = here->connect<supervisor_actor>("127.0.0.1", port, wait_limit);
    ASSERT_TRUE(found);
    supervisor = *found;
  }
  std::shared_ptr<told> join(const std::string& name, std::uint64_t incarnation) {
    return join(name, incarnation, *here);
  }
  std::shared_ptr<told> join(const std::string& name, std::uint64_t incarnation, actor_host& host) {
    auto request = request_of(name, incarnation);
    request.node.stage = name.starts_with("prefill") ? "prefill" : "decode";
    request.node.role = static_cast<std::uint8_t>(name.starts_with("prefill") ? node_role::prefill
                                                                              : node_role::decode);
    request.node.ranks = name.starts_with("decode-0") ? 2 : 1;
    request.node.rank = name == "decode-0-1" ? 1 : 0;
    auto ear = std::make_shared<told>();
    auto handle = host.system().spawn(listening_node, ear, request.node);
    host.own(handle);
    const auto boss = host.connect<supervisor_actor>("127.0.0.1", port, wait_limit);
    if (!boss) {
      ADD_FAILURE() << boss.error().message;
      return ear;
    }
    caf::scoped_actor self{host.system()};
    self->request(*boss, wait_limit, register_atom_v, request, handle)
        .receive([&](registration& r) { EXPECT_EQ(r.failed, 0) << r.sentence; },
                 [&](caf::error& e) { ADD_FAILURE() << host.system().render(e); });
    return ear;
  }
  void beat(const std::string& name, std::uint64_t incarnation, std::uint32_t queue = 0) {
    heartbeat h{name, incarnation, ++sequence, {}, {}};
    h.load.queue_length = queue;
    if (const auto newest = client->members()) h.epoch = newest->epoch;
    caf::scoped_actor self{here->system()};
    self->request(supervisor, wait_limit, h)
        .receive([&](heartbeat_ack&) {},
                 [&](caf::error& e) { ADD_FAILURE() << here->system().render(e); });
  }
  /// Registers prefill-0, life 2 of rank 0 and life 3 of rank 1 of decode-0. Returns what the ranks
  /// are told.
  std::array<std::shared_ptr<told>, 2> join_prefill_and_ranks() {
    join("prefill-0", 1);
    std::array ranks{join("decode-0", 2), join("decode-0-1", 3)};
    beat("prefill-0", 1);
    beat("decode-0", 2);
    beat("decode-0-1", 3);
    return ranks;
  }
};

TEST_F(drain_of_nodes, takes_the_whole_replica_out_and_lets_it_leave_when_nothing_is_left) {
  const auto [rank_0, rank_1] = join_prefill_and_ranks();
  ASSERT_TRUE(client->place({"r1", "", "", 0, {}}));

  const auto drained = client->drain({"decode-0-1", long_after});
  ASSERT_TRUE(drained) << drained.error().message;
  EXPECT_EQ(drained->sentence, "decode-0-1, decode-0");
  EXPECT_EQ(drained->incarnation, 3u);
  EXPECT_TRUE(becomes("decode-0", node_state::leaving));
  EXPECT_TRUE(becomes("decode-0-1", node_state::leaving));
  for (const auto& ear : {rank_0, rank_1}) {
    ASSERT_EQ(ear->orders(1).size(), 1u);
    EXPECT_EQ(ear->orders(1)[0].step, drain_step::finish);
  }
  EXPECT_EQ(client->place({"r2", "", "", 0, {}}).error().code, errc::peer_unreachable);

  for (int i = 0; i < 3; ++i) {
    beat("decode-0", 2);
    beat("decode-0-1", 3);
  }
  EXPECT_TRUE(comes_true([&] {
    return reason("decode-0").starts_with("is drained within ") &&
           reason("decode-0").find(": 1") != std::string::npos;
  })) << reason("decode-0");
  ASSERT_TRUE(client->finished("r1"));
  EXPECT_TRUE(comes_true([&] {
    beat("decode-0", 2);
    beat("decode-0-1", 3);
    return reason("decode-0") == "drained" && reason("decode-0-1") == "drained";
  })) << reason("decode-0");
  ASSERT_EQ(rank_0->orders(2).size(), 2u);
  ASSERT_EQ(rank_1->orders(2).size(), 2u);
  EXPECT_EQ(rank_0->orders(2)[1].step, drain_step::leave);
  EXPECT_EQ(rank_0->orders(2)[1].incarnation, 2u);
  EXPECT_EQ(rank_1->orders(2)[1].incarnation, 3u);
}

TEST_F(drain_of_nodes, ends_at_its_deadline_with_what_is_still_live) {
  const auto ear = join("decode-1", 5);
  beat("decode-1", 5, 4);
  ASSERT_TRUE(client->drain({"decode-1", 100}));
  ASSERT_EQ(ear->orders(2).size(), 2u);
  EXPECT_EQ(ear->orders(2)[1].step, drain_step::leave);
  EXPECT_THAT(reason("decode-1"), HasSubstr("deadline of 100 ms passed: 4 in its queue"));
  caf::anon_send(supervisor, leave_atom_v, std::string{"decode-1"}, std::uint64_t{5});
  here.reset();
  supervisor = nullptr;
  EXPECT_TRUE(becomes("decode-1", node_state::down));
  EXPECT_THAT(reason("decode-1"), HasSubstr("deadline of 100 ms passed: 4 in its queue"));
}

TEST_F(drain_of_nodes, is_refused_in_a_sentence_where_there_is_nothing_to_drain) {
  EXPECT_THAT(refusal("decode-7"), HasSubstr("not_found: the deployment has no node 'decode-7'"));
  EXPECT_THAT(refusal("supervisor"), HasSubstr("is not drained"));
  EXPECT_THAT(refusal("decode-1"), HasSubstr("has never registered"));
  EXPECT_THAT(refusal(std::string(10'000, 'x')), HasSubstr("..."));
  join("decode-1", 5);
  EXPECT_EQ(refusal("decode-1"), "none");
  EXPECT_THAT(refusal("decode-1"), HasSubstr("already_exists"));
}

TEST_F(drain_of_nodes, outlives_a_registration_of_the_same_life_and_not_one_of_the_next) {
  join("decode-1", 5);
  beat("decode-1", 5);
  ASSERT_TRUE(client->drain({"decode-1", long_after}));
  const auto again = join("decode-1", 5);
  ASSERT_EQ(again->orders(1).size(), 1u) << "it is told again";
  beat("decode-1", 5, 1);
  EXPECT_EQ(node_state_from(seen("decode-1")->state), node_state::leaving);
  const auto next = join("decode-1", 6);
  beat("decode-1", 6);
  EXPECT_TRUE(becomes("decode-1", node_state::up));
  EXPECT_TRUE(next->orders(0).empty());
}

TEST_F(drain_of_nodes, that_is_cancelled_lets_the_whole_replica_serve_on) {
  const auto [rank_0, rank_1] = join_prefill_and_ranks();
  const auto cancelled = [&](const std::string& name) { return client->drain({name, 0, 1}); };
  EXPECT_EQ(cancelled("decode-0").error().code, errc::not_found);
  ASSERT_TRUE(client->place({"r1", "", "", 0, {}}));
  ASSERT_TRUE(client->drain({"decode-0", long_after}));
  EXPECT_EQ(client->place({"r2", "", "", 0, {}}).error().code, errc::peer_unreachable);
  const auto serving = cancelled("decode-0-1");
  ASSERT_TRUE(serving) << serving.error().message;
  EXPECT_EQ(serving->sentence, "decode-0, decode-0-1");
  for (const auto& ear : {rank_0, rank_1}) {
    ASSERT_EQ(ear->orders(2).size(), 2u);
    EXPECT_EQ(ear->orders(2)[1].step, drain_step::resume);
  }
  EXPECT_TRUE(client->place({"r3", "", "", 0, {}})) << "at once";
  ASSERT_TRUE(client->finished("r1"));
  ASSERT_TRUE(client->finished("r3"));
  for (int i = 0; i < 3; ++i) {
    beat("decode-0", 2);
    beat("decode-0-1", 3);
  }
  EXPECT_EQ(node_state_from(seen("decode-0")->state), node_state::up)
      << "nobody judges it any more";
  EXPECT_EQ(rank_0->orders(2).size(), 2u);
  // A rank that missed the end of the drain is told when it is back.
  const auto again = join("decode-0-1", 3);
  ASSERT_EQ(again->orders(1).size(), 1u);
  EXPECT_EQ(again->orders(1)[0].step, drain_step::resume);
}

TEST_F(drain_of_nodes, that_is_over_cannot_be_cancelled) {
  const auto ear = join("decode-1", 5);
  beat("decode-1", 5, 4);
  ASSERT_TRUE(client->drain({"decode-1", 100}));
  ASSERT_EQ(ear->orders(2).size(), 2u);
  const auto late = client->drain({"decode-1", 0, 1});
  ASSERT_FALSE(late);
  EXPECT_EQ(late.error().code, errc::peer_lost);
  EXPECT_THAT(late.error().message, HasSubstr("was told to leave already"));
}

TEST_F(drain_of_nodes, that_ended_while_a_rank_was_away_is_over_for_that_rank_too) {
  join("prefill-0", 1);
  join("decode-0", 2);
  auto away = std::make_unique<actor_host>();
  join("decode-0-1", 3, *away);
  ASSERT_TRUE(client->drain({"decode-0", long_after}));
  away.reset();
  EXPECT_TRUE(becomes("decode-0-1", node_state::down));
  EXPECT_TRUE(comes_true([&] {
    beat("decode-0", 2);
    return reason("decode-0") == "drained";
  })) << reason("decode-0");
  const auto again = join("decode-0-1", 3);
  ASSERT_EQ(again->orders(1).size(), 1u);
  EXPECT_EQ(again->orders(1)[0].step, drain_step::leave);
  for (const auto* rank : {"decode-0", "decode-0-1"}) {
    const auto late = client->drain({rank, 0, 1});
    ASSERT_FALSE(late) << rank << " was told to leave";
    EXPECT_THAT(late.error().message, HasSubstr("was told to leave already (drained)"));
  }
}

/// A store, which is an engine like any other to the supervisor.
struct drain_of_an_engine : drained_cluster {
  std::unique_ptr<engine> node;

  [[nodiscard]] config::deployment deployment() const {
    auto parsed = config::parse(
        "cluster: drains\nsupervisor: {host: 127.0.0.1, port: " + std::to_string(port) +
            ", heartbeat_interval: 50ms, heartbeat_timeout: 30min}\n"
            "security: {mode: none}\n"
            "stages: [{name: cache, role: store, pool: {size: 1MiB}}]\n",
        "test.yaml");
    for (const auto& issue : parsed.issues) ADD_FAILURE() << config::to_string(issue);
    return parsed.value.value_or(config::deployment{});
  }
  void start_supervisor() { start(supervisor_options_from(deployment())); }
  void SetUp() override {
    start_supervisor();
    auto made = engine::start(deployment(), "cache-0");
    ASSERT_TRUE(made) << made.error().message;
    node = std::move(*made);
    node->set_queue_length(1);
    ASSERT_TRUE(becomes("cache-0", node_state::up));
    EXPECT_EQ(node->draining(), drain_standing::serving);
  }
};

TEST_F(drain_of_an_engine, tells_it_at_once_and_again_when_it_may_stop) {
  ASSERT_TRUE(client->drain({"cache-0", long_after}));
  EXPECT_TRUE(comes_true([&] { return node->draining() == drain_standing::draining; }));
  std::this_thread::sleep_for(milliseconds{300});
  EXPECT_EQ(node->draining(), drain_standing::draining) << "it has a request";
  node->set_queue_length(0);
  EXPECT_TRUE(comes_true([&] { return node->draining() == drain_standing::drained; }));
  node->stop();
  EXPECT_EQ(node->draining(), drain_standing::drained);
  EXPECT_TRUE(becomes("cache-0", node_state::down));
  EXPECT_EQ(reason("cache-0"), "drained");
}

TEST_F(drain_of_an_engine, goes_on_by_itself_when_the_supervisor_is_restarted) {
  ASSERT_TRUE(client->drain({"cache-0", long_after}));
  EXPECT_TRUE(comes_true([&] { return node->draining() == drain_standing::draining; }));
  start_supervisor();
  EXPECT_TRUE(becomes("cache-0", node_state::leaving)) << "it says so itself";
  EXPECT_EQ(node->draining(), drain_standing::draining);
  node->set_queue_length(0);
  EXPECT_TRUE(comes_true([&] { return node->draining() == drain_standing::drained; }));
  node->stop();
  EXPECT_TRUE(becomes("cache-0", node_state::down));
}

TEST_F(drain_of_an_engine, gets_a_deadline_again_from_a_supervisor_that_was_restarted) {
  ASSERT_TRUE(client->drain({"cache-0", long_after}));
  EXPECT_TRUE(comes_true([&] { return node->draining() == drain_standing::draining; }));
  start_supervisor();
  ASSERT_TRUE(becomes("cache-0", node_state::leaving));
  ASSERT_EQ(refusal("cache-0", 1000), "none");
  EXPECT_TRUE(comes_true([&] { return node->draining() == drain_standing::drained; }));
  EXPECT_THAT(reason("cache-0"), HasSubstr("deadline of 1 s passed"));
}

TEST_F(drain_of_an_engine, tells_it_when_it_shall_serve_on) {
  ASSERT_TRUE(client->drain({"cache-0", long_after}));
  EXPECT_TRUE(comes_true([&] { return node->draining() == drain_standing::draining; }));
  ASSERT_TRUE(client->drain({"cache-0", 0, 1}));
  EXPECT_TRUE(comes_true([&] { return node->draining() == drain_standing::serving; }));
  EXPECT_TRUE(becomes("cache-0", node_state::up));
  node->set_queue_length(0);
  std::this_thread::sleep_for(milliseconds{300});
  EXPECT_EQ(node->draining(), drain_standing::serving);
  start_supervisor();
  ASSERT_TRUE(becomes("cache-0", node_state::up)) << "nor does it remember a drain";
  EXPECT_EQ(node->draining(), drain_standing::serving);
}

TEST_F(drain_of_an_engine, whose_supervisor_forgot_it_is_not_cancelled_and_may_be_drained_again) {
  ASSERT_TRUE(client->drain({"cache-0", long_after}));
  EXPECT_TRUE(comes_true([&] { return node->draining() == drain_standing::draining; }));
  start_supervisor();
  ASSERT_TRUE(becomes("cache-0", node_state::leaving));
  const auto cancelled = [&] { return client->drain({"cache-0", 0, 1}).error().message; };
  EXPECT_THAT(cancelled(), HasSubstr("has been drained since before the supervisor was restarted"));
  ASSERT_TRUE(client->drain({"cache-0", long_after})) << "for the sake of a deadline";
  EXPECT_THAT(cancelled(), HasSubstr("has been drained since before the supervisor was restarted"));
  EXPECT_TRUE(becomes("cache-0", node_state::leaving));
  EXPECT_EQ(node->draining(), drain_standing::draining);
}

}  // namespace
}  // namespace troupe::actors::testing
