// The link cannot be rebuilt, or only over another backend. In the virtual machine also: wires that
// are cut for less than the NIC's patience, for longer, and for good.

#include <gmock/gmock.h>

#include "rebuild_fixture.hpp"

namespace troupe::testing {
namespace {

using ::testing::HasSubstr;

cluster_options without_attempts(const way& w, const std::string& more = "") {
  auto options = unhurried(options_of(w));
  options.transport_more = ", max_reconnects: 0" + more;
  return options;
}

class unmendable : public breakable {
 protected:
  unmendable() : breakable{without_attempts(GetParam())} {}
};

TEST_P(unmendable, fails_both_sides_naming_the_cause_and_gives_their_blocks_back) {
  start_prefill();
  const auto id = receive_two_layers(7);
  events->listen_for(50ms);
  cut();
  ASSERT_TRUE(events->unpinned(id));
  auto& t = events->of(id);
  EXPECT_EQ(t.failed, 1);
  EXPECT_EQ(t.why.code, errc::peer_lost);
  EXPECT_THAT(t.why.message, HasSubstr("the link to prefill-0 broke ("));
  EXPECT_THAT(t.why.message, HasSubstr("in 0 attempts"));
  give_back(*t.allocated);
  EXPECT_THAT(ask(*first, "outcome"), HasSubstr("in 0 attempts"));
  // A live peer is reached again by the next operation.
  take_from(*first, "next", 8);
}

INSTANTIATE_TEST_SUITE_P(every_way, unmendable, ::testing::ValuesIn(every_way()), name_of);

std::string other_than(const std::string& backend) {
  return backend == "tcp" ? "shm" : "tcp";
}

class fallen_back : public breakable {
 protected:
  fallen_back()
      : breakable{
            without_attempts(GetParam(), ", fallback: [" + other_than(GetParam().backend) + "]")} {}
};

TEST_P(fallen_back, goes_on_over_the_next_backend_and_says_so) {
  start_prefill();
  const auto id = receive_two_layers(7);
  events->listen_for(50ms);
  cut();
  expect_rebuilt(1);
  expect_rest_taken(id, 7);
  EXPECT_EQ(link().backend, other_than(GetParam().backend));
  EXPECT_THAT(link().reason, HasSubstr(GetParam().backend + " failed: "));
}

INSTANTIATE_TEST_SUITE_P(every_way, fallen_back, ::testing::ValuesIn(every_way()), name_of);

// -- real wires

/// Writes only: Soft-RoCE that loses a packet in the middle of a read may continue with wrong
/// bytes.
class torn_wire : public breakable {
 protected:
  explicit torn_wire(const std::string& more = ", rdma: {timeout: 14}")
      : breakable{options(more)} {}
  ~torn_wire() override { wire("lose 0 0"); }
  static cluster_options options(const std::string& more) {
    auto options = options_of(GetParam());
    options.deadline = "10min";
    options.transport_more = ", max_reconnects: 2" + more;
    options.connect_timeout = "5s";
    // Software NICs that retransmit leave little processor time for heartbeats.
    options.heartbeat_timeout = "30min";
    return options;
  }
  /// Tears the wire under load until the link is being rebuilt, and for a second longer.
  void expect_another_link_between(const std::string& torn, const std::string& mended) {
    start_load();
    events->listen_for(30ms);
    ASSERT_TRUE(wire(torn));
    ASSERT_TRUE(events->until([&] { return link().state == "rebuilding"; })) << link().state;
    events->listen_for(1s);
    ASSERT_TRUE(wire(mended));
    expect_loaded();
    EXPECT_TRUE(events->until([&] { return link().rebuilds >= 1; })) << link().last_break;
  }
};

/// NICs that retransmit seven times, every 2 s.
class patiently_torn_wire : public torn_wire {
 protected:
  patiently_torn_wire() : torn_wire{", rdma: {timeout: 19, retry_count: 6}"} {}
};

TEST_P(patiently_torn_wire, for_less_than_the_patience_of_the_nic_is_not_noticed) {
  start_load();
  events->listen_for(30ms);
  ASSERT_TRUE(wire("lose 0 100"));
  events->listen_for(300ms);
  ASSERT_TRUE(wire("lose 0 0"));
  expect_loaded();
  EXPECT_EQ(link().rebuilds, 0u) << link().last_break;
}

TEST_P(torn_wire, for_more_than_that_is_joined_by_another_link) {
  expect_another_link_between("lose 0 100", "lose 0 0");
}

TEST_P(torn_wire, by_a_port_that_goes_down_and_comes_up_is_joined_by_another_link) {
  expect_another_link_between("cut 0 b", "restore 0 b");
}

TEST_P(torn_wire, for_good_fails_both_sides_after_the_last_attempt_and_gives_their_blocks_back) {
  start_load();
  events->listen_for(30ms);
  ASSERT_TRUE(wire("lose 0 100"));
  std::size_t failed = 0;
  for (const auto id : load) {
    ASSERT_TRUE(events->unpinned(id));
    auto& t = events->of(id);
    EXPECT_EQ(t.done + t.failed, 1);
    if (t.failed > 0) {
      ++failed;
      EXPECT_EQ(t.why.code, errc::peer_lost) << to_string(t.why);
      EXPECT_THAT(t.why.message, HasSubstr("could not be made again in 2 attempts"));
    }
    if (!t.allocated) continue;
    ASSERT_TRUE(node->free_blocks(t.allocated->owner, t.allocated->blocks));
  }
  EXPECT_GT(failed, 0u);
  EXPECT_TRUE(whole(*node));
  const auto theirs = first->channel().hear().value_or("silence");
  EXPECT_THAT(theirs, HasSubstr("could not be made again in"));
  EXPECT_THAT(theirs, ::testing::Not(HasSubstr("blocks are missing")));
}

/// A device of this process fails under load.
class lost_device : public breakable {
 protected:
  lost_device() : breakable{options()} {}
  static cluster_options options() {
    auto options = options_of(GetParam());
    options.deadline = "10min";
    options.transport_more = ", max_reconnects: 6, fallback: [tcp]";
    options.heartbeat_timeout = "30min";
    return options;
  }
};

TEST_P(lost_device, leaves_what_it_carried_to_the_next_backend_and_says_so) {
  start_load();
  events->listen_for(30ms);
  EXPECT_EQ(link().backend, "rdma");
  ASSERT_TRUE(lose_rdma_devices());
  ASSERT_TRUE(events->until([&] { return link().backend == "tcp" && link().state == "up"; }))
      << link().backend << " is " << link().state << ": " << link().last_break;
  expect_loaded();
  EXPECT_THAT(link().last_break, HasSubstr("is gone: "));
  EXPECT_THAT(link().reason, HasSubstr("rdma failed: "));
  EXPECT_THAT(link().reason, HasSubstr("is gone: ")) << "not that a wire is down";
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(lost_device);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(torn_wire);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(patiently_torn_wire);
std::vector<way> real_wires() {
  return have_verbs() ? std::vector<way>{{"rdma", "write"}} : std::vector<way>{};
}
INSTANTIATE_TEST_SUITE_P(real, lost_device, ::testing::ValuesIn(real_wires()), name_of);
INSTANTIATE_TEST_SUITE_P(real, torn_wire, ::testing::ValuesIn(real_wires()), name_of);
INSTANTIATE_TEST_SUITE_P(real, patiently_torn_wire, ::testing::ValuesIn(real_wires()), name_of);

}  // namespace
}  // namespace troupe::testing
