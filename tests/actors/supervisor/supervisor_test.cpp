// The supervisor over real sockets: two actor systems in this process, and processes that are
// killed and stopped. CLUSTER_PEER is the helper process (cluster_peer.cpp).

#include "troupe/actors/supervisor/supervisor.hpp"

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

#include <caf/scoped_actor.hpp>
#include <gmock/gmock.h>

#include "troupe/actors/cluster_client.hpp"

#include "child_process.hpp"
#include "cluster_peer.hpp"
#include "end_of_monitored.hpp"
#include "fails_with.hpp"
#include "free_port.hpp"
#include "waiting.hpp"

namespace troupe::actors::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using troupe::testing::child_process;
using troupe::testing::comes_true;
using troupe::testing::fails_with;
using troupe::testing::wait_limit;

/// For timeouts that must not end a wait: longer than any wait.
const milliseconds long_after = 10 * wait_limit;
const auto long_after_ms = static_cast<std::uint32_t>(long_after.count());
const auto wait_limit_ms = static_cast<std::uint32_t>(milliseconds{wait_limit}.count());

std::optional<node_state> state_in(const membership& m, const std::string& name) {
  for (const member& x : m.members) {
    if (x.node.name == name) return node_state_from(x.state);
  }
  return std::nullopt;
}

/// One actor system for the supervisor, and one that simulates nodes and frontends.
struct cluster : ::testing::Test {
  std::unique_ptr<actor_host> there = std::make_unique<actor_host>();
  std::unique_ptr<actor_host> here = std::make_unique<actor_host>();
  std::uint16_t port{0};
  supervisor_actor supervisor;

  void start(supervisor_options options = three_nodes(), std::uint16_t wanted = 0) {
    const auto bound =
        there->publish(spawn_supervisor(there->system(), options), "127.0.0.1", wanted);
    ASSERT_TRUE(bound) << bound.error().message;
    port = *bound;
    reconnect();
  }
  void reconnect() {
    auto found = here->connect<supervisor_actor>("127.0.0.1", port, wait_limit);
    ASSERT_TRUE(found) << found.error().message;
    supervisor = *found;
  }
  template <class Reply, class... Args>
  Reply ask(Args&&... args) {
    Reply reply{};
    caf::scoped_actor self{here->system()};
    self->request(supervisor, wait_limit, std::forward<Args>(args)...)
        .receive([&](Reply& r) { reply = std::move(r); },
                 [&](caf::error& e) { ADD_FAILURE() << here->system().render(e); });
    return reply;
  }
  registration join(const registration_request& request, const std::shared_ptr<told>& ear = {}) {
    auto handle =
        here->system().spawn(listening_node, ear ? ear : std::make_shared<told>(), request.node);
    here->own(handle);
    return ask<registration>(register_atom_v, request, handle);
  }
  bool beat(const std::string& name, std::uint64_t incarnation, std::uint32_t queue = 0) {
    heartbeat h{name, incarnation, ++sequence, {}, {}};
    h.load.queue_length = queue;
    return ask<heartbeat_ack>(h).known;
  }
  std::optional<node_state> state(const std::string& name) {
    return state_in(ask<membership>(members_atom_v), name);
  }
  bool becomes(const std::string& name, node_state wanted) {
    return comes_true([&] { return state(name) == wanted; }, milliseconds{5});
  }
  /// The events of that node, in order.
  std::vector<std::string> events_of(const std::string& name) {
    std::vector<std::string> all;
    for (const auto& event : ask<event_page>(events_atom_v, event_query{}).events) {
      if (event.node == name) all.push_back(event.what);
    }
    return all;
  }
  child_process peer(const std::string& name, std::uint64_t incarnation) {
    return child_process{
        {CLUSTER_PEER, "node", std::to_string(port), name, std::to_string(incarnation)}};
  }
  std::uint64_t sequence{0};
};

// -- registering and placing

TEST_F(cluster, takes_nodes_in_places_between_them_and_lets_them_leave) {
  start();
  ASSERT_EQ(join(request_of("prefill-0", 11)).failed, 0);
  const auto reply = join(request_of("decode-1", 12));
  EXPECT_EQ(reply.replica, 1u);
  EXPECT_EQ(reply.heartbeat_interval_ms, three_nodes().members.heartbeat_interval.count());
  EXPECT_EQ(state("decode-1"), node_state::joining);
  EXPECT_TRUE(beat("prefill-0", 11));
  EXPECT_TRUE(beat("decode-1", 12));
  const auto placed =
      ask<placement>(place_atom_v, placement_request{"r1", "prefill", "decode", 0, {}});
  ASSERT_EQ(placed.failed, 0) << placed.sentence;
  EXPECT_EQ(placed.mode, transfer_mode::read);
  ASSERT_EQ(placed.decode.size(), 1u);
  EXPECT_EQ(placed.decode[0].incarnation, 12u);

  caf::anon_send(supervisor, leave_atom_v, std::string{"decode-1"}, std::uint64_t{12});
  EXPECT_TRUE(becomes("decode-1", node_state::leaving));
  const auto none =
      ask<placement>(place_atom_v, placement_request{"r2", "prefill", "decode", 0, {}});
  EXPECT_EQ(none.failed, static_cast<std::uint8_t>(errc::peer_unreachable));
  EXPECT_THAT(none.sentence, HasSubstr("decode-0 never registered, decode-1 leaving"));
}

TEST_F(cluster, refuses_strangers_over_the_wire_with_a_sentence) {
  start();
  auto other = request_of("decode-0", 1);
  other.cluster = std::string(100000, 'x');
  EXPECT_EQ(join(other).failed, static_cast<std::uint8_t>(errc::invalid_config));
  auto old = request_of("decode-0", 1);
  old.version = 77;
  EXPECT_EQ(join(old).failed, static_cast<std::uint8_t>(errc::version_mismatch));
  EXPECT_THAT(join(request_of("nobody", 1)).sentence,
              HasSubstr("the deployment has no node 'nobody'"));
  const auto no_handle = ask<registration>(register_atom_v, request_of("decode-0", 1),
                                           caf::actor_cast<node_actor>(caf::strong_actor_ptr{}));
  EXPECT_THAT(no_handle.sentence, HasSubstr("without a handle"));
  EXPECT_TRUE(ask<membership>(members_atom_v).members.empty());
}

TEST_F(cluster, every_node_hears_of_every_change_and_bursts_are_told_together) {
  auto options = three_nodes();
  options.tick = milliseconds{100};  // all of them come within one tick
  start(options);
  const auto ear = std::make_shared<told>();
  ASSERT_EQ(join(request_of("prefill-0", 1), ear).failed, 0);
  ASSERT_EQ(join(request_of("decode-0", 2)).failed, 0);
  ASSERT_EQ(join(request_of("decode-1", 3)).failed, 0);
  for (int i = 1; i <= 3; ++i) beat(three_nodes().members.slots[i - 1].name, i);
  EXPECT_TRUE(ear->wait_for([](const membership& m) {
    return m.epoch == 6 && state_in(m, "decode-1") == node_state::up;
  }));
  EXPECT_LT(ear->count(), 6);
}

TEST_F(cluster, a_node_that_registers_again_unchanged_still_learns_the_list) {
  start();
  ASSERT_EQ(join(request_of("decode-0", 2)).failed, 0);
  std::this_thread::sleep_for(milliseconds{150});
  const auto ear = std::make_shared<told>();
  ASSERT_EQ(join(request_of("decode-0", 2), ear).failed, 0);
  EXPECT_TRUE(ear->wait_for([](const membership& m) { return m.members.size() == 1; }));
}

TEST_F(cluster, a_request_waits_for_a_replica_to_come_up) {
  start();
  ASSERT_EQ(join(request_of("prefill-0", 1)).failed, 0);
  beat("prefill-0", 1);
  placement placed;
  std::thread asker{[&] {
    placed = ask<placement>(place_atom_v, placement_request{"r1", "", "", long_after_ms, {}});
  }};
  std::this_thread::sleep_for(milliseconds{50});
  caf::scoped_actor self{here->system()};
  ASSERT_EQ(join(request_of("decode-0", 2)).failed, 0);
  beat("decode-0", 2);
  asker.join();
  EXPECT_EQ(placed.failed, 0) << placed.sentence;
}

TEST_F(cluster, a_request_that_waited_in_vain_is_told_so_at_its_deadline) {
  start();
  const auto begin = steady_clock::now();
  const auto placed = ask<placement>(place_atom_v, placement_request{"r1", "", "", 200, {}});
  EXPECT_EQ(placed.failed, static_cast<std::uint8_t>(errc::deadline));
  EXPECT_GE(steady_clock::now() - begin, milliseconds{200});
}

TEST_F(cluster, whoever_asks_for_a_name_is_counted_whatever_the_answer_is) {
  auto options = three_nodes();
  options.claims_asked = std::make_shared<std::atomic<std::uint64_t>>(0);
  const auto asked = options.claims_asked;
  start(options);
  name_request claim;
  claim.cluster = "demo";
  claim.incarnation = 1;
  claim.host = "127.0.0.1";
  for (const auto* stage : {"decode", "no-such"}) {
    claim.stage = stage;
    EXPECT_NE(ask<name_lease>(lease_name_atom_v, claim).failed, 0)
        << "it knows nothing of the cluster";
  }
  EXPECT_EQ(asked->load(), 2u);
}

// -- death, freezing, return

TEST_F(cluster, a_killed_node_is_down_before_heartbeats_or_a_silent_connection_would_tell) {
  there = std::make_unique<actor_host>(actor_host_options{.connection_timeout = long_after});
  start(three_nodes(wait_limit));
  auto node = peer("decode-0", 5);
  ASSERT_EQ(node.line(), "registered");
  ASSERT_TRUE(becomes("decode-0", node_state::up));
  node.kill();
  EXPECT_TRUE(becomes("decode-0", node_state::down));

  auto next = peer("decode-0", 6);
  EXPECT_EQ(next.line(), "registered");
  EXPECT_TRUE(becomes("decode-0", node_state::up));
}

TEST_F(cluster, a_stopped_node_is_suspect_then_down_and_is_told_to_register_when_it_wakes) {
  start(three_nodes(milliseconds{100}));
  auto node = peer("decode-0", 5);
  ASSERT_EQ(node.line(), "registered");
  ASSERT_TRUE(becomes("decode-0", node_state::up));
  node.stop();
  EXPECT_TRUE(becomes("decode-0", node_state::down));
  auto events = events_of("decode-0");
  ASSERT_GE(events.size(), 2u);
  EXPECT_EQ(events[events.size() - 2], "suspect");
  EXPECT_EQ(events.back(), "down");
  node.go_on();
  auto said = node.line();
  // It may have been stopped while it waited for an answer.
  while (said.starts_with("lost")) said = node.line();
  EXPECT_EQ(said, "unknown");
  EXPECT_EQ(state("decode-0"), node_state::down) << "heartbeats alone bring nobody back";
}

TEST_F(cluster, a_silent_node_whose_connection_stands_is_told_to_register_again) {
  start(three_nodes(milliseconds{100}));
  const auto ear = std::make_shared<told>();
  ASSERT_EQ(join(request_of("decode-0", 5), ear).failed, 0);
  beat("decode-0", 5);
  EXPECT_TRUE(ear->wait_for_rejoin());
  EXPECT_EQ(state("decode-0"), node_state::down);
}

TEST_F(cluster, a_second_process_of_the_same_name_is_refused_while_the_first_lives) {
  start();
  auto first = peer("decode-0", 5);
  ASSERT_EQ(first.line(), "registered");
  auto second = peer("decode-0", 6);
  EXPECT_THAT(second.line(), HasSubstr("refused node 'decode-0' is"));
  EXPECT_EQ(second.line(), "unknown") << "nor do its heartbeats count";
  EXPECT_TRUE(becomes("decode-0", node_state::up));
  EXPECT_EQ(first.finish(), 0);
}

TEST_F(cluster, a_supervisor_restarted_on_its_port_gets_its_cluster_back) {
  start();
  ASSERT_EQ(join(request_of("decode-0", 5)).failed, 0);
  ASSERT_TRUE(beat("decode-0", 5));
  const auto before = ask<membership>(members_atom_v).supervisor_incarnation;
  there.reset();
  there = std::make_unique<actor_host>();
  start(three_nodes(), port);
  EXPECT_NE(ask<membership>(members_atom_v).supervisor_incarnation, before);
  EXPECT_FALSE(beat("decode-0", 5)) << "it must be told to register again";
  ASSERT_EQ(join(request_of("decode-0", 5)).failed, 0);
  EXPECT_TRUE(beat("decode-0", 5));
  EXPECT_EQ(state("decode-0"), node_state::up);
}

// -- ports and connections

TEST_F(cluster, a_taken_port_is_named) {
  start();
  const auto again =
      here->publish(spawn_supervisor(here->system(), three_nodes()), "127.0.0.1", port);
  ASSERT_THAT(again, fails_with(errc::already_exists,
                                HasSubstr("cannot listen at 127.0.0.1:" + std::to_string(port) +
                                          ": Address already in use; choose another port")));
}

TEST_F(cluster, an_address_of_another_host_is_named) {
  const auto bound = here->publish(spawn_supervisor(here->system(), three_nodes()), "192.0.2.1", 0);
  ASSERT_THAT(bound, fails_with(errc::invalid_config, HasSubstr("not an address of this machine")));
}

TEST_F(cluster, a_listener_that_says_nothing_is_given_up_at_the_deadline) {
  const troupe::testing::taken_port silent;
  ASSERT_NE(silent.number(), 0);
  for (int i = 0; i < 2; ++i) {
    const auto begin = steady_clock::now();
    const auto found =
        here->connect<supervisor_actor>("127.0.0.1", silent.number(), milliseconds{300});
    ASSERT_FALSE(found);
    EXPECT_EQ(found.error().code, errc::deadline);
    // The door reports it or, if the door is late, the caller that waits for it.
    EXPECT_THAT(found.error().message, AnyOf(HasSubstr("said nothing in time"),
                                             HasSubstr("but did not answer within 300 ms")));
    EXPECT_GE(steady_clock::now() - begin, milliseconds{300});
  }
  start();  // other addresses can be reached meanwhile
  EXPECT_TRUE(ask<membership>(members_atom_v).members.empty());
}

TEST_F(cluster, a_port_where_nobody_listens_is_unreachable_at_once) {
  std::uint16_t free_port = 0;
  {
    const troupe::testing::taken_port gone;
    free_port = gone.number();
  }
  const auto found = here->connect<supervisor_actor>("127.0.0.1", free_port, wait_limit);
  ASSERT_THAT(found, fails_with(errc::peer_unreachable, HasSubstr("Connection refused")));
  EXPECT_EQ(here->connect<supervisor_actor>("127.0.0.1", 0, milliseconds{100}).error().code,
            errc::invalid_config);
}

TEST_F(cluster, an_actor_of_another_kind_is_not_taken_for_a_node) {
  start();
  const auto found = here->connect<node_actor>("127.0.0.1", port, wait_limit);
  ASSERT_FALSE(found);
  EXPECT_EQ(found.error().code, errc::version_mismatch);
}

TEST_F(cluster, a_frozen_peer_loses_its_connection_and_an_idle_one_keeps_it) {
  here = std::make_unique<actor_host>(actor_host_options{.network_heartbeat = milliseconds{500},
                                                         .connection_timeout = milliseconds{4000}});
  child_process process{{CLUSTER_PEER, "supervisor", "0"}};
  const std::string up = process.line();
  ASSERT_THAT(up, HasSubstr("up "));
  port = static_cast<std::uint16_t>(std::stoi(up.substr(3)));
  reconnect();
  caf::scoped_actor self{here->system()};
  self->monitor(supervisor);
  EXPECT_FALSE(troupe::testing::monitored_ends_within(self, milliseconds{5000})) << "idle";
  process.stop();
  EXPECT_TRUE(troupe::testing::monitored_ends_within(self, wait_limit)) << "frozen";
}

// -- the client

TEST_F(cluster, a_client_sees_members_places_reports_and_calls) {
  start();
  auto request = request_of("decode-0", 5);
  auto node = here->system().spawn(listening_node, std::make_shared<told>(), request.node);
  const auto node_port = here->publish(node, "127.0.0.1", 0);
  ASSERT_TRUE(node_port);
  request.node.port = *node_port;
  ASSERT_EQ(ask<registration>(register_atom_v, request, node).failed, 0);
  beat("decode-0", 5, 3);

  auto client = cluster_client::connect({.host = "127.0.0.1", .port = port, .timeout = wait_limit});
  ASSERT_TRUE(client) << client.error().message;
  cluster_client& c = **client;
  const auto members = c.members();
  ASSERT_TRUE(members);
  ASSERT_EQ(members->members.size(), 1u);
  EXPECT_EQ(members->members[0].load.queue_length, 3u);

  const auto report = c.report("decode-0");
  ASSERT_TRUE(report) << report.error().message;
  EXPECT_EQ(report->node.incarnation, 5u);
  EXPECT_EQ(c.report("prefill-0").error().code, errc::not_found);

  const auto reply = c.call("decode-0", {"echo", {1, 2, 3}, 0});
  ASSERT_TRUE(reply) << reply.error().message;
  EXPECT_EQ(*reply, (std::vector<std::uint8_t>{1, 2, 3}));
  const auto refused = c.call("decode-0", {"dance", {}, 0});
  EXPECT_EQ(refused.error(), (troupe::error{errc::not_found, "this engine has no method 'dance'"}));
  EXPECT_EQ(c.call("decode-0", {"echo", bytes(max_call_bytes + 1), 0}).error().code,
            errc::out_of_range);

  const auto placed = c.place({"r1", "prefill", "decode", 0, {}});
  ASSERT_THAT(placed, fails_with(errc::peer_unreachable, HasSubstr("stage 'prefill'")));
}

TEST_F(cluster, a_client_outlives_a_supervisor_that_is_killed_and_gives_up_on_a_stopped_one) {
  auto process =
      std::make_unique<child_process>(std::vector<std::string>{CLUSTER_PEER, "supervisor", "0"});
  const std::string up = process->line();
  ASSERT_THAT(up, HasSubstr("up "));
  const auto at = static_cast<std::uint16_t>(std::stoi(up.substr(3)));
  auto client =
      cluster_client::connect({.host = "127.0.0.1", .port = at, .timeout = milliseconds{2000}});
  ASSERT_TRUE(client) << client.error().message;
  ASSERT_TRUE((*client)->members());

  process->stop();
  const auto silent = (*client)->members();
  ASSERT_FALSE(silent);
  EXPECT_EQ(silent.error().code, errc::deadline);
  process->kill();
  const auto gone = (*client)->members();
  ASSERT_FALSE(gone);

  process = std::make_unique<child_process>(
      std::vector<std::string>{CLUSTER_PEER, "supervisor", std::to_string(at)});
  ASSERT_THAT(process->line(), HasSubstr("up "));
  EXPECT_TRUE(comes_true([&] { return (*client)->members().has_value(); }));
  EXPECT_EQ(process->finish(), 0);
}

TEST_F(cluster, a_client_that_waits_for_a_supervisor_that_is_killed_is_told_and_waits_no_longer) {
  child_process process{{CLUSTER_PEER, "supervisor", "0"}};
  const std::string up = process.line();
  ASSERT_THAT(up, HasSubstr("up "));
  const auto at = static_cast<std::uint16_t>(std::stoi(up.substr(3)));
  auto client = cluster_client::connect({.host = "127.0.0.1",
                                         .port = at,
                                         .timeout = wait_limit,
                                         .actors = {.connection_timeout = long_after}});
  ASSERT_TRUE(client) << client.error().message;
  std::thread killer{[&] {
    std::this_thread::sleep_for(milliseconds{100});
    process.kill();
  }};
  const auto placed = (*client)->place({"r1", "", "", wait_limit_ms, {}});
  killer.join();
  ASSERT_FALSE(placed);
  EXPECT_EQ(placed.error().code, errc::peer_lost);
}

// -- the end

TEST(supervisor_options, come_from_the_deployment) {
  config::deployment d;
  d.cluster = "demo";
  d.supervisor.heartbeat_interval = milliseconds{200};
  d.supervisor.heartbeat_timeout = milliseconds{900};
  d.supervisor.ease_in = milliseconds{700};
  config::stage_config prefill;
  prefill.name = "prefill";
  config::stage_config decode;
  decode.name = "decode";
  decode.role = config::role::decode;
  decode.replicas = 2;
  decode.tensor_parallel = 2;
  decode.policy = config::placement_policy::least_queue_length;
  d.stages = {prefill, decode};
  d.edges = {{"prefill", "decode", config::transfer_mode::read},
             {"decode", "prefill", std::nullopt}};
  d.limits.max_waiting = 9;
  const supervisor_options o = supervisor_options_from(d);
  EXPECT_EQ(o.members.cluster, "demo");
  EXPECT_EQ(o.members.heartbeat_interval, milliseconds{200});
  EXPECT_EQ(o.members.heartbeat_timeout, milliseconds{900});
  EXPECT_EQ(o.routes.max_waiting, 9u);
  EXPECT_EQ(o.routes.ease_in, milliseconds{700});
  EXPECT_EQ(o.routes.policies.at("decode"), placement_policy::least_queue_length);
  ASSERT_EQ(o.routes.edges.size(), 2u);
  EXPECT_EQ(o.routes.edges[0].mode, transfer_mode::read);
  EXPECT_EQ(o.routes.edges[1].mode, std::nullopt);
  ASSERT_EQ(o.members.slots.size(), 5u);
  EXPECT_EQ(o.members.slots[0].role, node_role::prefill);
  EXPECT_EQ(o.members.slots[4].stage, "decode");
  EXPECT_EQ(o.members.slots[4].role, node_role::decode);
  EXPECT_EQ(o.members.slots[4].replica, 1u);
  EXPECT_EQ(o.members.slots[4].rank, 1u);
  EXPECT_EQ(o.members.slots[4].ranks, 2u);
}

TEST_F(cluster, stops_without_waiting_for_a_placement_and_answers_who_still_waits) {
  const actor_host_options patient{.shutdown_timeout = wait_limit};
  there = std::make_unique<actor_host>(patient);
  here = std::make_unique<actor_host>(patient);
  start();
  ASSERT_EQ(join(request_of("prefill-0", 1)).failed, 0);
  placement placed;
  {
    caf::scoped_actor self{here->system()};
    const auto refused = [](caf::error& e) { ADD_FAILURE() << to_string(e); };
    auto asked = self->request(supervisor, wait_limit, place_atom_v,
                               placement_request{"r1", "", "", long_after_ms, {}});
    // The placement is in line once the supervisor answers a later request.
    self->request(supervisor, wait_limit, members_atom_v).receive([](membership&) {}, refused);
    EXPECT_TRUE(there->shutdown()) << "some actor did not end";
    there.reset();
    asked.receive([&](placement& answer) { placed = std::move(answer); }, refused);
  }
  EXPECT_EQ(placed.failed, static_cast<std::uint8_t>(errc::aborted));
  supervisor = nullptr;
  EXPECT_TRUE(here->shutdown()) << "some actor did not end";
}

TEST_F(cluster, an_actor_that_ignores_its_end_does_not_hold_up_the_process) {
  actor_host host{{.shutdown_timeout = milliseconds{100}}};
  const auto stubborn = [](caf::event_based_actor* self,
                           std::chrono::hours next_tick) -> caf::behavior {
    self->set_exit_handler([](caf::exit_msg&) {});
    self->delayed_send(self, next_tick, tick_atom_v);
    return {[](tick_atom) {}};
  };
  host.system().spawn(stubborn, std::chrono::hours{1});
  EXPECT_FALSE(host.shutdown());
}

TEST_F(cluster, nor_does_one_with_a_thread_of_its_own) {
  auto host =
      std::make_unique<actor_host>(actor_host_options{.shutdown_timeout = milliseconds{100}});
  const auto stubborn = [](caf::event_based_actor* self,
                           std::chrono::hours next_tick) -> caf::behavior {
    self->set_exit_handler([](caf::exit_msg&) {});
    self->delayed_send(self, next_tick, tick_atom_v);
    return {[](tick_atom) {}};
  };
  host->system().spawn<caf::detached>(stubborn, std::chrono::hours{1});
  host.reset();  // must return
}

}  // namespace
}  // namespace troupe::actors::testing
