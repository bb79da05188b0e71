// The events that the supervisor remembers and logs, read as `troupe events` reads them.

#include <cstdio>
#include <thread>

#include <caf/scoped_actor.hpp>
#include <gmock/gmock.h>

#include "troupe/actors/cluster_client.hpp"
#include "troupe/actors/logging.hpp"
#include "troupe/actors/membership/event_log.hpp"

#include "cluster_peer.hpp"
#include "scratch_folder.hpp"
#include "text_of.hpp"
#include "waiting.hpp"

namespace troupe::actors::testing {
namespace {

using std::chrono::milliseconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

struct supervisor_events : ::testing::Test {
  std::unique_ptr<actor_host> there = std::make_unique<actor_host>();
  actor_host here;
  std::uint16_t port{0};
  std::unique_ptr<cluster_client> client;
  supervisor_actor supervisor;
  std::uint64_t beats{0};

  void start(milliseconds interval = milliseconds{3000}) {
    const auto bound =
        there->publish(spawn_supervisor(there->system(), three_nodes(interval)), "127.0.0.1", port);
    ASSERT_TRUE(bound) << bound.error().message;
    port = *bound;
    auto found = here.connect<supervisor_actor>("127.0.0.1", port, troupe::testing::wait_limit);
    ASSERT_TRUE(found) << found.error().message;
    supervisor = *found;
    if (client) return;
    client = cluster_client::unconnected(
        {.host = "127.0.0.1", .port = port, .timeout = troupe::testing::wait_limit});
  }
  registration join(const registration_request& request) {
    auto node = here.system().spawn(listening_node, std::make_shared<told>(), request.node);
    here.own(node);
    auto reply = ask<registration>(here.system(), supervisor, "the supervisor",
                                   troupe::testing::wait_limit, register_atom_v, request, node);
    EXPECT_TRUE(reply);
    return reply ? *reply : registration{};
  }
  void beat(const std::string& name, std::uint64_t incarnation) {
    const heartbeat h{name, incarnation, ++beats, {}, {}};
    EXPECT_TRUE(ask<heartbeat_ack>(here.system(), supervisor, "the supervisor",
                                   troupe::testing::wait_limit, h));
  }
  event_page events(std::uint64_t after = 0, std::uint32_t max = 0) {
    auto page = client->events({after, max});
    EXPECT_TRUE(page) << page.error().message;
    return page ? *page : event_page{};
  }
  std::vector<std::string> of(const std::string& node) {
    std::vector<std::string> out;
    for (const auto& event : events().events)
      if (event.node == node) out.push_back(event.what);
    return out;
  }
  bool happens(const std::string& node, const std::string& what) {
    return troupe::testing::comes_true(
        [&] {
          const auto all = of(node);
          return std::ranges::find(all, what) != all.end();
        },
        milliseconds{10});
  }
};

TEST_F(supervisor_events, begin_with_its_own_start) {
  start();
  const auto page = events();
  ASSERT_EQ(page.events.size(), 1u);
  EXPECT_EQ(page.events[0].what, "started");
  EXPECT_EQ(page.events[0].node, "supervisor");
  EXPECT_EQ(page.events[0].incarnation, page.supervisor_incarnation);
  EXPECT_THAT(page.events[0].text, HasSubstr("cluster demo expects 3 nodes"));
  EXPECT_GT(page.events[0].unix_ms, 1'700'000'000'000u);
}

TEST_F(supervisor_events, tell_a_nodes_life_with_the_reasons_and_epochs) {
  start(milliseconds{100});
  auto request = request_of("decode-0", 0x5, 4711);
  request.node.pid = 815;
  ASSERT_EQ(join(request).failed, 0);
  beat("decode-0", 0x5);
  ASSERT_TRUE(happens("decode-0", "down"));
  EXPECT_THAT(of("decode-0"), ElementsAre("joining", "up", "suspect", "down"));
  const auto all = events().events;
  EXPECT_THAT(all[1].text, HasSubstr("registered from '127.0.0.1' port 4711 (pid 815) as replica 0 "
                                     "of stage decode"));
  EXPECT_EQ(all[2].text, "first heartbeat");
  EXPECT_THAT(all[4].text, HasSubstr("not heard for"));
  for (std::size_t i = 1; i < all.size(); ++i) {
    EXPECT_EQ(all[i].sequence, i + 1);
    EXPECT_EQ(all[i].epoch, i);
    EXPECT_EQ(all[i].incarnation, 0x5u);
  }
}

TEST_F(supervisor_events, come_in_pages_that_go_on_where_the_last_one_ended) {
  start();
  ASSERT_EQ(join(request_of("decode-0", 1)).failed, 0);
  ASSERT_EQ(join(request_of("decode-1", 2)).failed, 0);
  ASSERT_EQ(join(request_of("prefill-0", 3)).failed, 0);
  const auto first = events(0, 3);
  ASSERT_EQ(first.events.size(), 3u);
  EXPECT_EQ(first.newest, 4u);
  const auto rest = events(first.events.back().sequence);
  ASSERT_EQ(rest.events.size(), 1u);
  EXPECT_EQ(rest.events[0].node, "prefill-0");
  EXPECT_TRUE(events(4).events.empty());
}

TEST_F(supervisor_events, of_strangers_are_limited_and_what_they_say_is_tamed) {
  start();
  auto stranger = request_of("decode-0", 9);
  stranger.node.name = "no\nbody\033[2J" + std::string(100'000, 'x');
  for (int i = 0; i < 20; ++i) EXPECT_NE(join(stranger).failed, 0);
  const auto all = events().events;
  ASSERT_GE(all.size(), 2u);
  EXPECT_LE(all.size(), 1u + 20u / 2) << "at most one a second";
  EXPECT_EQ(all[1].what, "refused");
  EXPECT_EQ(all[1].incarnation, 9u);
  EXPECT_EQ(all[1].node.substr(0, 10), "no?body?[2");
  EXPECT_LE(all[1].node.size(), max_event_word);
  EXPECT_THAT(all[1].text, HasSubstr("not_found: the deployment has no node"));
}

TEST_F(supervisor_events, of_requests_that_nobody_can_take_are_limited_too) {
  start();
  for (int i = 0; i < 20; ++i) {
    placement_request request;
    request.request = "r" + std::to_string(i);
    EXPECT_FALSE(client->place(request));
  }
  const auto all = events().events;
  ASSERT_GE(all.size(), 2u);
  EXPECT_LE(all.size(), 1u + 20u / 2);
  EXPECT_EQ(all[1].what, "unplaced");
  EXPECT_EQ(all[1].node, "");
  EXPECT_THAT(all[1].text, HasSubstr("request 'r0': peer_unreachable: "));
}

TEST_F(supervisor_events, of_a_restarted_one_begin_with_one_and_another_incarnation) {
  start();
  ASSERT_EQ(join(request_of("decode-0", 5)).failed, 0);
  const auto before = events().supervisor_incarnation;
  there.reset();
  there = std::make_unique<actor_host>();
  EXPECT_FALSE(client->events({0, 0})) << "it is away";
  start();
  const auto page = events();
  EXPECT_NE(page.supervisor_incarnation, before);
  ASSERT_EQ(page.events.size(), 1u);
  EXPECT_EQ(page.events[0].sequence, 1u);
  EXPECT_EQ(page.events[0].what, "started");
}

TEST_F(supervisor_events, are_logged_once_each_in_the_form_that_the_readme_names) {
  const troupe::testing::scratch_folder folder;
  const auto path = folder.path() + "/events.log";
  ASSERT_TRUE(init_logging({.node = "supervisor", .file = path}));
  start();
  ASSERT_EQ(join(request_of("decode-0", 5)).failed, 0);
  beat("decode-0", 5);
  const auto all = events().events;
  there.reset();
  ASSERT_TRUE(init_logging({}));
  const auto text = troupe::testing::text_of(path);
  ASSERT_EQ(all.size(), 3u);
  for (const auto& event : all) {
    const auto line = " supervisor supervisor: " + event_line(event) + "\n";
    const auto at = text.find(line);
    EXPECT_NE(at, std::string::npos) << line << text;
    EXPECT_EQ(text.find(line, at + 1), std::string::npos) << line;
  }
  EXPECT_THAT(text, HasSubstr("event=up node=decode-0 incarnation=0000000000000005 epoch=2 "
                              "reason=\"first heartbeat\"\n"));
  EXPECT_THAT(text, HasSubstr("event=stopped node=supervisor "));
}

}  // namespace
}  // namespace troupe::actors::testing
