#include <cstring>

#include "troupe/transport/shm/wire.hpp"

#include "slow_kernels.hpp"
#include "two_nodes.hpp"

// Memory of a GPU that was lent to a peer, and how the loan ends.
namespace troupe::transport::xgmi {
namespace {

using namespace std::chrono_literals;

/// The other end of a link, made by hand.
struct handmade_peer {
  explicit handmade_peer(two_nodes& nodes) : n{nodes} {
    n.b.wire->close();
    n.b.sink = std::make_shared<contract::recorder>();
    two_nodes::open(n.b, n.a.self, link_role::acceptor);
    shm::shm_offer self;
    self.pid = static_cast<std::uint32_t>(::getpid());
    self.address[0] = 'x';
    EXPECT_TRUE(n.b.wire->connect({backend_kind::xgmi, n.a.self, self.encode()}));
    const auto offer = shm::shm_offer::decode(n.b.wire->offer().payload).value();
    socket = shm::connect_to(offer.address.data()).value();
    shm::hello_message hello;
    hello.acceptor_token = offer.secret;
    hello.dialer = n.a.self.value;
    hello.acceptor = n.b.self.value;
    EXPECT_TRUE(shm::send_message(socket.get(), hello));
    EXPECT_TRUE(receives<shm::welcome_message>());
    EXPECT_TRUE(shm::send_message(socket.get(), shm::ready_message{}));
    EXPECT_TRUE(n.until([&] { return n.b.sink->ups == 1; }));
  }
  /// Whether the next message that it receives is of this kind.
  template <class Message>
  [[nodiscard]] bool receives() {
    std::optional<shm::message> next;
    n.until([&] {
      auto got = shm::receive_message(socket.get(), shm::fds_allowed::yes);
      if (got && std::holds_alternative<shm::received>(*got)) {
        next = std::get<shm::received>(*got).body;
      }
      return next || !got;
    });
    return next && std::holds_alternative<Message>(*next);
  }
  void says_closed(region_id region) const {
    EXPECT_TRUE(
        shm::send_message(socket.get(), shm::gpu_region_closed_message{.region = region.value}));
  }
  [[nodiscard]] bool is_refused() {
    return n.until([&] { return n.b.sink->is_broken(); }) &&
           n.b.sink->broken->code == errc::unauthorized;
  }

  two_nodes& n;
  owned_fd socket;
};

struct lent : ::testing::Test {
  /// Lends the region of `b` on its GPU, then leaves it free of grants.
  void lend() {
    region = n.b.place->allocate_on_gpu(1, mib, "there").value();
    memory = n.b.place->bytes(region)->data();
    static_cast<void>(n.grant(n.b, region, mib));
    EXPECT_EQ(n.b.wire->fence(t1), fence_state::quiescent);
  }
  [[nodiscard]] bool is_there() const { return n.driver->holds(memory); }
  /// Lets `b` do all that it does of its own accord.
  void drive_owner() const {
    for (int i = 0; i < 200; ++i) n.b.place->poll();
  }
  void drive_both() const {
    for (int i = 0; i < 200; ++i) {
      n.a.place->poll();
      n.b.place->poll();
    }
  }

  two_nodes n;
  region_id region;
  const std::byte* memory{nullptr};
};

TEST_F(lent, memory_is_freed_when_the_peer_says_that_it_has_closed_it) {
  lend();
  ASSERT_TRUE(n.b.place->deregister(region));
  drive_owner();
  EXPECT_TRUE(is_there()) << "the peer has not looked yet";
  EXPECT_TRUE(n.until([&] { return !is_there(); }));
  EXPECT_FALSE(n.b.sink->is_broken());
}

TEST_F(lent, memory_that_no_peer_was_told_of_is_freed_at_once) {
  region = n.b.place->allocate_on_gpu(1, mib, "there").value();
  memory = n.b.place->bytes(region)->data();
  ASSERT_TRUE(n.b.place->deregister(region));
  EXPECT_FALSE(is_there());
}

TEST_F(lent, a_peer_that_never_answers_keeps_memory_no_longer_than_its_link) {
  lend();
  ASSERT_TRUE(n.b.place->deregister(region));
  drive_owner();
  ASSERT_TRUE(is_there());
  n.b.wire->close();
  EXPECT_TRUE(n.until([&] { return !is_there(); }));
}

TEST_F(lent, what_was_lent_over_a_link_that_ended_is_freed_with_the_region) {
  lend();
  n.b.wire->close();
  drive_both();
  EXPECT_TRUE(is_there()) << "it is still registered";
  ASSERT_TRUE(n.b.place->deregister(region));
  EXPECT_TRUE(n.until([&] { return !is_there(); }));
}

TEST_F(lent, memory_lent_over_two_links_waits_for_both_peers) {
  handmade_peer peer{n};
  lend();
  ASSERT_TRUE(peer.receives<shm::gpu_region_shared_message>());
  const auto first = std::exchange(n.b.wire, nullptr);
  const auto first_sink = n.b.sink;
  n.b.sink = std::make_shared<contract::recorder>();
  two_nodes::open(n.b, n.a.self, link_role::acceptor);
  n.a.sink = std::make_shared<contract::recorder>();
  two_nodes::open(n.a, n.b.self, link_role::initiator);
  n.connect();
  static_cast<void>(n.grant(n.b, region, mib));
  n.b.wire->fence(t1);
  ASSERT_TRUE(n.b.place->deregister(region));
  ASSERT_TRUE(peer.receives<shm::region_gone_message>());
  drive_both();  // the other end answers
  EXPECT_TRUE(is_there());
  peer.says_closed(region);
  EXPECT_TRUE(n.until([&] { return !is_there(); }));
  EXPECT_FALSE(first_sink->is_broken());
  first->close();
}

TEST_F(lent, a_region_that_is_still_registered_cannot_be_said_to_be_closed) {
  handmade_peer peer{n};
  lend();
  ASSERT_TRUE(peer.receives<shm::gpu_region_shared_message>());
  peer.says_closed(region);
  EXPECT_TRUE(peer.is_refused());
  EXPECT_TRUE(is_there());
  EXPECT_TRUE(n.b.place->deregister(region));
}

TEST_F(lent, a_region_is_said_to_be_closed_once) {
  handmade_peer peer{n};
  lend();
  ASSERT_TRUE(peer.receives<shm::gpu_region_shared_message>());
  ASSERT_TRUE(n.b.place->deregister(region));
  ASSERT_TRUE(peer.receives<shm::region_gone_message>());
  drive_owner();
  EXPECT_TRUE(is_there());
  peer.says_closed(region);
  EXPECT_TRUE(n.until([&] { return !is_there(); }));
  EXPECT_FALSE(n.b.sink->is_broken());
  peer.says_closed(region);
  EXPECT_TRUE(peer.is_refused());
}

TEST_F(lent, a_region_that_the_peer_was_never_told_of_cannot_be_said_to_be_closed) {
  handmade_peer peer{n};
  region = n.b.place->allocate_on_gpu(1, mib, "there").value();
  memory = n.b.place->bytes(region)->data();
  peer.says_closed(region);
  EXPECT_TRUE(peer.is_refused());
  EXPECT_TRUE(is_there());
}

TEST_F(lent, freeing_waits_for_the_gpu_and_no_frame_waits_for_that) {
  lend();
  slow_kernels kernels{*n.driver};
  kernels.launch();
  ASSERT_TRUE(n.b.place->deregister(region));
  const auto text = std::as_bytes(std::span{"on its way", 10});
  drive_both();  // the peer answers
  ASSERT_TRUE(n.a.wire->send_frame(text));
  EXPECT_TRUE(n.until([&] { return n.b.sink->framed() == 1; }));
  EXPECT_TRUE(is_there());
  kernels.finish(0);
  EXPECT_TRUE(n.until([&] { return !is_there(); }));
}

}  // namespace
}  // namespace troupe::transport::xgmi
