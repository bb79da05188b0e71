// Memory of an engine in a process that its peer may not trace: no link comes up, since nothing
// could move over it. Memory that the endpoint allocates needs no tracing.

#include "troupe/transport/shm/tracing.hpp"

#include <gmock/gmock.h>

#include "hidden_memory.hpp"
#include "processes.hpp"

namespace troupe::transport::shm_test {
namespace {

using ::testing::HasSubstr;

constexpr incarnation ours{101};
constexpr incarnation theirs{202};

enum class verdict : std::uint8_t { up, unavailable, otherwise };

verdict verdict_of(const node& self) {
  if (!eventually([&] { return self.said->ups() > 0 || !self.said->broken().empty(); }))
    return verdict::otherwise;
  if (self.said->ups() > 0) return verdict::up;
  return self.said->broken().front().code == errc::backend_unavailable ? verdict::unavailable
                                                                       : verdict::otherwise;
}

/// Exchanges offers and waits for the result.
verdict meet(node& self, incarnation peer, link_role role, channel& line) {
  self.open(peer, role);
  line.send(self.to_peer->offer().payload);
  const link_offer offer{.kind = backend_kind::shm, .owner = peer, .payload = line.receive()};
  if (!self.to_peer->connect(offer)) return verdict::otherwise;
  return verdict_of(self);
}

/// The other process: gives up the right to reach its parent, and reports if it still reaches it.
void be_without_rights(link_role role, channel& line) {
  (void)line.receive_value<bool>();  // the parent's memory is hidden now
  const bool barred = testing::give_up_rights() && !testing::reaches_parent();
  line.send_value(barred);
  if (!barred) return;
  node self{theirs.value};
  const auto seen = meet(self, ours, role, line);
  line.send_value(seen);
  const auto broken = self.said->broken();
  line.send(bytes_of(broken.empty() ? "" : broken.front().message));
  (void)line.receive_value<bool>();
}

class hidden : public ::testing::TestWithParam<link_role> {
 protected:
  [[nodiscard]] static link_role other(link_role role) {
    return role == link_role::initiator ? link_role::acceptor : link_role::initiator;
  }
  other_process peer{[](channel& line) { be_without_rights(other(GetParam()), line); }};
  testing::hidden_memory no_longer_reached;

  void SetUp() override {
    peer.line().send_value(true);
    if (!peer.line().receive_value<bool>()) {
      GTEST_SKIP() << "this process cannot hide its memory from another one";
    }
  }
};

TEST_P(hidden, memory_of_an_engine_makes_the_link_fail_at_both_ends_with_the_reason) {
  std::vector<std::byte> memory(4096);
  node self{ours.value};
  ASSERT_TRUE(self.place->register_memory(memory, "the engine's"));
  EXPECT_EQ(meet(self, theirs, GetParam(), peer.line()), verdict::unavailable);
  ASSERT_EQ(self.said->broken().size(), 1U);
  EXPECT_THAT(self.said->broken()[0].message,
              HasSubstr("the peer may not reach this process's memory"));
  EXPECT_EQ(self.said->ups(), 0);
  EXPECT_EQ(peer.line().receive_value<verdict>(), verdict::unavailable);
  const auto said = peer.line().receive();
  EXPECT_THAT((std::string{reinterpret_cast<const char*>(said.data()), said.size()}),
              HasSubstr("this process may not reach the peer's memory"));
}

TEST_P(hidden, process_has_a_link_for_memory_that_its_endpoint_allocated) {
  node self{ours.value};
  (void)self.allocate(4096);
  EXPECT_EQ(meet(self, theirs, GetParam(), peer.line()), verdict::up);
  EXPECT_EQ(peer.line().receive_value<verdict>(), verdict::up);
}

INSTANTIATE_TEST_SUITE_P(as, hidden, ::testing::Values(link_role::initiator, link_role::acceptor),
                         [](const auto& tested) {
                           return tested.param == link_role::initiator ? "dialer" : "acceptor";
                         });

// -- ptrace_scope

TEST(ptrace_scope, each_value_has_a_sentence_that_says_what_to_change) {
  EXPECT_THAT(shm::why_not_traced(std::nullopt), HasSubstr("give them CAP_SYS_PTRACE"));
  EXPECT_EQ(shm::why_not_traced(0), shm::why_not_traced(std::nullopt));
  EXPECT_THAT(shm::why_not_traced(1), HasSubstr("kernel.yama.ptrace_scope is 1"));
  EXPECT_THAT(shm::why_not_traced(1), HasSubstr("set it to 0"));
  EXPECT_THAT(shm::why_not_traced(2), HasSubstr("set it to 1"));
  EXPECT_THAT(shm::why_not_traced(3), HasSubstr("boot this host"));
}

TEST(ptrace_scope, a_peer_that_comes_again_does_not_shut_the_others_out) {
  shm::named_tracers named;
  EXPECT_EQ(named.with(7), 7U);
  EXPECT_EQ(named.with(7), 7U);
  EXPECT_EQ(named.with(8), PR_SET_PTRACER_ANY);
  EXPECT_EQ(named.with(7), PR_SET_PTRACER_ANY);
}

TEST(ptrace_scope, of_1_is_enough_for_a_peer_that_was_named) {
  if (shm::ptrace_scope() != 1) GTEST_SKIP() << "kernel.yama.ptrace_scope is not 1 here";
  if (::geteuid() == 0) GTEST_SKIP() << "root reaches every process's memory";
  other_process peer{[](channel& line) {
    line.send_value(static_cast<std::uint32_t>(::getpid()));
    line.send_value(testing::reaches_parent());
    (void)line.receive_value<bool>();
    line.send_value(testing::reaches_parent());
  }};
  const auto pid = peer.line().receive_value<std::uint32_t>();
  ASSERT_FALSE(peer.line().receive_value<bool>());
  shm::let_trace(pid);
  peer.line().send_value(true);
  EXPECT_TRUE(peer.line().receive_value<bool>());
}

TEST(ptrace_scope, of_1_is_enough_for_memory_that_came_after_the_link) {
  if (shm::ptrace_scope() != 1) GTEST_SKIP() << "kernel.yama.ptrace_scope is not 1 here";
  if (::geteuid() == 0) GTEST_SKIP() << "root reaches every process's memory";
  other_process peer{[](channel& line) {
    node self{theirs.value};
    line.send_value(meet(self, ours, link_role::acceptor, line));
    (void)line.receive_value<bool>();
  }};
  node self{ours.value};
  ASSERT_EQ(meet(self, theirs, link_role::initiator, peer.line()), verdict::up);
  ASSERT_EQ(peer.line().receive_value<verdict>(), verdict::up);
  std::vector<std::byte> memory(4096);
  const auto region = self.place->register_memory(memory, "the engine's, later");
  ASSERT_TRUE(region);
  const auto given =
      self.to_peer->grant(*region, {{0, memory.size(), 0, 1}}, access::read_write, transfer_id{1});
  EXPECT_TRUE(given) << (given ? "" : to_string(given.error()));
}

}  // namespace
}  // namespace troupe::transport::shm_test
