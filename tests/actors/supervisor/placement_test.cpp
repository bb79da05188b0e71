// Where a frontend's requests go, over real sockets: nodes are processes that are killed and come
// back. CLUSTER_PEER is the helper process (cluster_peer.cpp).

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <thread>

#include <gmock/gmock.h>

#include "troupe/actors/cluster_client.hpp"
#include "troupe/actors/supervisor/supervisor.hpp"

#include "child_process.hpp"
#include "cluster_peer.hpp"
#include "waiting.hpp"

namespace troupe::actors::testing {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;
using troupe::testing::child_process;
using troupe::testing::slowness;

class placing : public ::testing::Test {
 protected:
  actor_host host;
  std::unique_ptr<cluster_client> client;
  std::uint16_t port{0};
  std::map<std::string, std::unique_ptr<child_process>> nodes;
  int requests{0};

  void start(milliseconds ease_in) {
    auto options = three_nodes();
    options.routes.ease_in = ease_in;
    const auto bound =
        host.publish(spawn_supervisor(host.system(), std::move(options)), "127.0.0.1", 0);
    ASSERT_TRUE(bound) << bound.error().message;
    port = *bound;
    auto connected = cluster_client::connect(
        {.host = "127.0.0.1", .port = port, .timeout = troupe::testing::wait_limit});
    ASSERT_TRUE(connected) << connected.error().message;
    client = std::move(*connected);
  }
  /// Starts a life of that node and waits until it is up.
  void bring_up(const std::string& name, std::uint64_t incarnation) {
    nodes[name] = std::make_unique<child_process>(std::vector<std::string>{
        CLUSTER_PEER, "node", std::to_string(port), name, std::to_string(incarnation)});
    ASSERT_EQ(nodes[name]->line(), "registered");
    ASSERT_TRUE(becomes(name, node_state::up, incarnation));
  }
  void kill(const std::string& name, std::uint64_t incarnation) {
    nodes.erase(name);
    ASSERT_TRUE(becomes(name, node_state::down, incarnation));
  }
  [[nodiscard]] bool becomes(const std::string& name, node_state wanted,
                             std::uint64_t incarnation) {
    return troupe::testing::comes_true(
        [&] {
          const auto all = client->members();
          return all && std::ranges::any_of(all->members, [&](const member& m) {
                   return m.node.name == name && m.node.incarnation == incarnation &&
                          node_state_from(m.state) == wanted;
                 });
        },
        milliseconds{5});
  }
  result<placement> ask(const std::string& affinity) {
    placement_request r;
    r.request = "r" + std::to_string(++requests);
    r.affinity = affinity;
    r.timeout_ms = 0;
    return client->place(r);
  }
  placement place(const std::string& affinity = "") {
    auto outcome = ask(affinity);
    if (outcome) return std::move(*outcome);
    ADD_FAILURE() << outcome.error().message;
    placement none;
    none.decode.resize(1);
    return none;
  }
  int taken_of(int n, const std::string& name) {
    int taken = 0;
    for (int i = 0; i < n; ++i) taken += place().decode.front().name == name ? 1 : 0;
    return taken;
  }
};

TEST_F(placing, requests_of_one_conversation_follow_it_when_its_node_is_killed_and_stay_there) {
  start(milliseconds{0});
  bring_up("prefill-0", 1);
  bring_up("decode-0", 2);
  bring_up("decode-1", 3);
  const std::string first = place("conversation").decode.front().name;
  const std::string second = first == "decode-0" ? "decode-1" : "decode-0";
  for (int i = 0; i < 5; ++i) {
    place();
    EXPECT_EQ(place("conversation").decode.front().name, first);
  }
  const std::uint64_t life = first == "decode-0" ? 2 : 3;
  kill(first, life);
  const placement moved = place("conversation");
  EXPECT_EQ(moved.decode.front().name, second);
  EXPECT_THAT(moved.sentence, HasSubstr("affinity 'conversation' moves in stage decode from"));
  EXPECT_THAT(moved.sentence, HasSubstr(first + " down"));
  bring_up(first, 9);
  for (int i = 0; i < 5; ++i) {
    place();
    const placement next = place("conversation");
    EXPECT_EQ(next.decode.front().name, second);
    EXPECT_EQ(next.sentence, "");
  }
}

TEST_F(placing, an_affinity_that_is_too_long_is_refused_by_name) {
  start(milliseconds{0});
  const auto refused = ask("session-" + std::string(1000, 'x'));
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, errc::invalid_config);
  EXPECT_THAT(refused.error().message, HasSubstr("has 1008: 'session-xxx"));
}

TEST_F(placing, a_node_that_was_killed_and_comes_back_empty_is_eased_in) {
  const milliseconds ease_in = milliseconds{2000} * slowness;
  start(ease_in);
  bring_up("prefill-0", 1);
  bring_up("decode-0", 2);
  bring_up("decode-1", 3);
  EXPECT_NEAR(taken_of(20, "decode-1"), 10, 2) << "both are new";
  std::this_thread::sleep_for(ease_in);
  kill("decode-1", 3);
  EXPECT_EQ(taken_of(10, "decode-1"), 0);
  bring_up("decode-1", 4);
  EXPECT_LE(taken_of(20, "decode-1"), 6);
  std::this_thread::sleep_for(ease_in);
  EXPECT_NEAR(taken_of(20, "decode-1"), 10, 2);
}

}  // namespace
}  // namespace troupe::actors::testing
