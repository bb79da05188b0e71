// An engine reports that it cannot serve. The node in this process is decode-0; prefill-0 is a
// process of its own.

#include <gmock/gmock.h>

#include "troupe/actors/cluster_client.hpp"

#include "fault_fixture.hpp"

namespace troupe::testing {
namespace {

using actors::node_state;
using ::testing::HasSubstr;

class reported_failure : public fault {
 protected:
  void SetUp() override {
    start_prefill();
    auto found = actors::cluster_client::connect(
        {"127.0.0.1", static_cast<std::uint16_t>(c.port()), wait_limit});
    ASSERT_TRUE(found) << to_string(found.error());
    client = std::move(*found);
    ASSERT_TRUE(comes_to(node_state::up));
  }
  actors::member shown() {
    if (const auto all = client->members()) {
      for (const auto& m : all->members) {
        if (m.node.name == "decode-0") return m;
      }
    }
    return {};
  }
  bool comes_to(node_state wanted) {
    return comes_true([&] { return actors::node_state_from(shown().state) == wanted; }, 5ms);
  }
  bool shows(const std::string& reason) {
    return comes_true([&] { return shown().reason == reason; }, 5ms);
  }
  result<actors::placement> place() { return client->place({"p", "prefill", "decode", 0, {}}); }

  std::unique_ptr<actors::cluster_client> client;
};

TEST_P(reported_failure, lasts_until_the_engine_recovers_and_touches_no_transfer) {
  const auto id = receive_two_layers(3);

  node->report_failure("GPU 0 fell off the bus");
  ASSERT_TRUE(comes_to(node_state::down));
  const auto epoch = client->members()->epoch;
  for (int i = 0; i < 10; ++i) {  // five heartbeats, none of which may bring it back
    EXPECT_EQ(actors::node_state_from(shown().state), node_state::down);
    EXPECT_EQ(shown().reason, "reports: GPU 0 fell off the bus");
    events->listen_for(100ms);
  }
  EXPECT_EQ(client->members()->epoch, epoch) << "it must not register again and again";
  EXPECT_TRUE(node->wait_registered(0ms)) << "its connection stands";
  const auto refused = place();
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, errc::peer_unreachable);

  expect_rest_taken(id, 3);

  const auto life = shown().node.incarnation;
  node->recover();
  ASSERT_TRUE(comes_to(node_state::up));
  EXPECT_EQ(shown().node.incarnation, life);
  EXPECT_TRUE(place());
}

TEST_P(reported_failure, that_is_followed_by_another_is_shown_with_the_newest_reason) {
  node->report_failure("no memory");
  ASSERT_TRUE(comes_to(node_state::down));
  // Whenever it registers again, it repeats its failure.
  node->report_failure("no memory at all");
  node->recover();
  node->report_failure("none left");
  EXPECT_TRUE(shows("reports: none left")) << shown().reason;
  node->recover();
  EXPECT_TRUE(comes_to(node_state::up));
}

TEST_P(reported_failure, of_a_node_that_then_dies_or_leaves_is_no_longer_its_state) {
  node->report_failure("no memory");
  ASSERT_TRUE(comes_to(node_state::down));
  node->stop();
  EXPECT_TRUE(shows("left")) << shown().reason;
}

INSTANTIATE_TEST_SUITE_P(every_way, reported_failure, ::testing::ValuesIn(every_way()), name_of);

}  // namespace
}  // namespace troupe::testing
