
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "troupe/io/descriptor.hpp"

#include "agents.hpp"
#include "open_descriptors.hpp"

// How transfers, peers and agents end.
namespace troupe::io {

using testing::open_descriptors;
using transport::direction;

namespace {

/// A listener that accepts connections and stays silent, and a descriptor that leads to it.
struct silent_listener {
  explicit silent_listener(const agent_node& looks_like) {
    fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(::bind(fd, reinterpret_cast<const sockaddr*>(&at), sizeof at), 0);
    EXPECT_EQ(::listen(fd, 16), 0);
    socklen_t size = sizeof at;
    EXPECT_EQ(::getsockname(fd, reinterpret_cast<sockaddr*>(&at), &size), 0);
    auto leads_here = descriptor::decode(looks_like.self->describe().value()).value();
    leads_here.port = ntohs(at.sin_port);
    described = leads_here.encode();
  }
  ~silent_listener() { ::close(fd); }
  silent_listener(const silent_listener&) = delete;
  silent_listener& operator=(const silent_listener&) = delete;

  int fd{-1};
  std::vector<std::byte> described;
};

}  // namespace

TEST_P(agents_test, a_cancelled_transfer_is_at_rest_and_the_others_go_on) {
  agent_pair p{GetParam()};
  ASSERT_TRUE(p.connected());
  for (const auto dir : {direction::write, direction::read}) {
    for (int round = 0; round < 10; ++round) {
      std::memset(p.a.memory.data(), 0x55, p.a.memory.size());
      std::memset(p.b.memory.data(), 0x33, p.b.memory.size());
      const auto out = p.make_blocks(dir, 32, 65'536);
      ASSERT_TRUE(p.a.self->post(out, {}, 0ms));
      for (int i = 0; i < round * 3; ++i) {
        p.a.self->poll();
        p.b.self->poll();
      }
      ASSERT_TRUE(p.a.self->cancel(out));
      const auto end = p.ended(p.a, out);
      ASSERT_TRUE(end.now == state::cancelled || end.now == state::done);
      if (end.now == state::cancelled) {
        EXPECT_FALSE(end.why);
        EXPECT_FALSE(end.bad_entries.empty());
      }
      std::memset(p.a.memory.data(), 0x44, p.a.memory.size());
      const auto other = p.make_blocks(direction::write, 1, 64);
      ASSERT_TRUE(p.a.self->post(other, {}, 0ms));
      ASSERT_EQ(p.ended(p.a, other).now, state::done);
      for (std::size_t i = 0; i < 32; ++i) {
        ASSERT_EQ(p.a.memory[i * 65'536 + 100], std::byte{0x44}) << "a read landed later";
      }
      EXPECT_TRUE(p.a.self->cancel(out));  // the transfer has ended
      EXPECT_TRUE(p.a.self->release(out));
      EXPECT_TRUE(p.a.self->release(other));
    }
  }
  EXPECT_EQ(code_of(p.a.self->cancel(transfer_handle{4711})), errc::not_found);
}

TEST_P(agents_test, a_transfer_to_nobody_ends_in_time_and_says_why) {
  const auto how = GetParam();
  agent_node a{"a", how};
  std::vector<std::byte> described;
  {
    const agent_node b{"b", how};
    described = b.self->describe().value();
  }
  const auto gone = a.self->add_peer(described).value();
  const auto number = a.self->remote_memories(gone)->back().number;
  const auto over = a.self->session(a.kv, gone, number).value();
  const auto sent = a.self->move(direction::write, over, std::vector<segment>{{0, 0, 64}}, {}, 0ms);
  ASSERT_TRUE(sent) << to_string(sent.error());
  EXPECT_EQ(a.self->wait(std::vector{*sent}, wait_for::all, long_time), 1U);
  const auto end = a.self->status_of(*sent).value();
  EXPECT_EQ(end.now, state::failed);
  EXPECT_EQ(end.why->code, errc::peer_unreachable) << to_string(*end.why);
  EXPECT_THAT(end.why->message, ::testing::HasSubstr("'b'"));
  const auto events = a.self->take(10);
  EXPECT_TRUE(std::ranges::any_of(
      events, [&](const event& one) { return one.what == event_kind::transfer_ended; }));
}

TEST_P(agents_test, a_transfer_that_waits_is_cancelled_and_ends_by_its_deadline) {
  const auto how = GetParam();
  agent_node a{"a", how};
  const agent_node silent{"silent", how};
  const silent_listener nobody{silent};
  const auto peer = a.self->add_peer(nobody.described).value();
  const auto over =
      a.self->session(a.kv, peer, a.self->remote_memories(peer)->back().number).value();
  const std::vector<segment> some{{0, 0, 64}};
  const auto one = a.self->move(direction::write, over, some, {}, 0ms).value();
  const auto other = a.self->move(direction::write, over, some, {}, 20ms).value();
  EXPECT_EQ(code_of(a.self->release(one)), errc::overloaded);
  EXPECT_TRUE(a.self->cancel(one));
  EXPECT_EQ(a.self->status_of(one)->now, state::cancelled);
  EXPECT_EQ(a.self->wait(std::vector{one, other}, wait_for::all, long_time), 2U);
  const auto end = a.self->status_of(other).value();
  EXPECT_EQ(end.now, state::failed);
  EXPECT_EQ(end.why->code, errc::deadline);
}

TEST_P(agents_test, a_removed_peer_is_forgotten_with_its_transfers) {
  agent_pair p{GetParam()};
  ASSERT_TRUE(p.connected());
  const auto out = p.make_blocks(direction::write, 32, 65'536);
  ASSERT_TRUE(p.a.self->post(out, {}, 0ms));
  ASSERT_TRUE(p.a.self->remove_peer(p.b_of_a));
  const auto end = p.ended(p.a, out);
  if (end.now == state::failed) {
    EXPECT_EQ(end.why->code, errc::aborted) << to_string(*end.why);
  }
  EXPECT_EQ(code_of(p.a.self->post(out, {}, 0ms)), errc::not_found);
  EXPECT_EQ(code_of(p.a.self->remove_peer(p.b_of_a)), errc::not_found);
  EXPECT_EQ(code_of(p.a.self->connect(p.b_of_a, 0ms)), errc::not_found);
  // The peer can be added again.
  p.b_of_a = p.a.self->add_peer(p.b.self->describe().value()).value();
  const auto again = p.make_blocks(direction::write, 1, 64);
  ASSERT_TRUE(p.a.self->post(again, {}, 0ms));
  EXPECT_EQ(p.ended(p.a, again).now, state::done);
}

TEST_P(agents_test, transfers_that_wait_for_grants_end_when_their_peer_is_removed) {
  if (GetParam().threads == 0) GTEST_SKIP() << "nobody polls while the test waits";
  constexpr std::size_t memories = 8;
  agent_pair p{GetParam()};
  for (std::size_t i = 0; i < memories; ++i) {
    const auto part = p.b.memory.subspan(i * 65'536, 65'536);
    ASSERT_TRUE(p.b.self->register_memory(part, "part", transport::access::write));
  }
  const auto described = p.b.self->describe().value();
  for (int round = 0; round < 40; ++round) {
    const auto who = p.a.self->add_peer(described).value();
    ASSERT_TRUE(p.a.self->connect(who, long_time));
    std::vector<transfer_handle> sent;
    const auto all = p.a.self->remote_memories(who).value();
    for (std::size_t i = all.size() - memories; i < all.size(); ++i) {
      const auto over = p.a.self->session(p.a.kv, who, all[i].number).value();
      sent.push_back(
          p.a.self->move(direction::write, over, std::vector<segment>{{0, 0, 64}}, {}, 0ms)
              .value());
      ASSERT_TRUE(p.a.self->release(over));
    }
    std::this_thread::sleep_for(round * 10us);  // as their grants arrive
    ASSERT_TRUE(p.a.self->remove_peer(who));
    ASSERT_EQ(p.a.self->wait(sent, wait_for::all, testing::wait_limit), sent.size());
    for (const auto one : sent) {
      const auto end = p.a.self->status_of(one).value();
      EXPECT_TRUE(end.now == state::done || end.now == state::failed);
      ASSERT_TRUE(p.a.self->release(one));
    }
  }
}

TEST_P(agents_test, an_agent_that_ends_as_a_peer_is_removed_leaves_no_descriptor) {
  if (GetParam().threads == 0) GTEST_SKIP() << "nobody polls an agent that ends";
  constexpr std::size_t rounds = 20;
  const agent_node b{"b", GetParam()};
  const auto before = open_descriptors();
  for (std::size_t round = 0; round < rounds; ++round) {
    const agent_node a{"a", GetParam()};
    const auto peer = a.self->add_peer(b.self->describe().value()).value();
    ASSERT_TRUE(a.self->connect(peer, long_time));
    ASSERT_TRUE(a.self->remove_peer(peer));
  }
  EXPECT_TRUE(testing::comes_true([&] { return open_descriptors() < before + rounds; }))
      << open_descriptors() << " are open, " << before << " were";
}

TEST_P(agents_test, a_peer_that_the_other_has_removed_still_knows_its_memory) {
  agent_pair p{GetParam()};
  const std::vector<segment> some{{0, 0, std::size_t{1} << 20}};
  for (int round = 0; round < 12; ++round) {
    ASSERT_TRUE(p.connected());
    const auto over = p.a.self->session(p.a.kv, p.b_of_a, p.b.kv.value);
    ASSERT_TRUE(over) << "round " << round << ": " << to_string(over.error());
    std::vector<transfer_handle> sent;
    for (int i = 0; i < 6; ++i) {
      sent.push_back(p.a.self->move(direction::write, *over, some, {}, 0ms).value());
    }
    for (int i = 0; i < round * 10; ++i) {  // cut at different places
      p.a.self->poll();
      p.b.self->poll();
    }
    ASSERT_TRUE(p.b.self->remove_peer(p.a_of_b));
    for (const auto one : sent) {
      static_cast<void>(p.ended(p.a, one));
      EXPECT_TRUE(p.a.self->release(one));
    }
    p.a_of_b = p.b.self->add_peer(p.a.self->describe().value()).value();
  }
}

TEST(agent_ends_test, a_notice_to_a_peer_that_no_backend_reaches_is_told_of) {
  agent_node a{"a", {transport::backend_kind::shm, 1}};
  const agent_node b{"b", {transport::backend_kind::tcp, 1}};
  const auto peer = a.self->add_peer(b.self->describe().value()).value();
  ASSERT_TRUE(a.self->notify(peer, bytes_of("hello")));
  std::vector<event> came;
  ASSERT_TRUE(testing::comes_true([&] {
    came = a.self->take(10);
    return !came.empty();
  }));
  EXPECT_EQ(came.front().what, event_kind::peer_lost);
  EXPECT_EQ(came.front().who, peer);
  ASSERT_TRUE(came.front().why);
  EXPECT_EQ(came.front().why->code, errc::backend_unavailable) << to_string(*came.front().why);
}

// Over shm a transfer is done once its bytes have landed; its notice is then still in the peer's
// ring.
TEST(agent_ends_test, the_last_notice_of_an_agent_that_ends_is_delivered) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "polled agents are not among `all_ways` here";
#endif
  auto a = std::make_unique<agent_node>("a", way{transport::backend_kind::shm, 1});
  const agent_node b{"b", {transport::backend_kind::shm, 0}};
  const auto peer = a->self->add_peer(b.self->describe().value()).value();
  const auto over = a->self->session(a->kv, peer, b.kv.value).value();
  const std::vector<segment> some{{0, 0, 64}};
  const auto first = a->self->move(direction::write, over, some, {}, 0ms).value();
  ASSERT_TRUE(testing::comes_true([&] {
    b.self->poll();
    return a->self->status_of(first)->now == state::done;
  }));
  const auto last = a->self->move(direction::write, over, some, bytes_of("the last"), 0ms).value();
  ASSERT_EQ(a->self->wait(std::vector{last}, wait_for::all, long_time), 1U);
  ASSERT_EQ(a->self->status_of(last)->now, state::done);
  a.reset();
  ASSERT_TRUE(testing::comes_true([&] { return b.self->report().peers.front().lost.has_value(); }));
  std::vector<notice> came;
  ASSERT_TRUE(testing::comes_true([&] {
    b.self->poll();
    came = b.self->take_notices(10);
    return !came.empty();
  }));
  EXPECT_EQ(text_of(came.front().bytes), "the last");
}

TEST_P(agents_test, an_agent_that_ends_takes_its_memory_back_and_its_peers_hear_of_it) {
  const auto how = GetParam();
  agent_node a{"a", how};
  std::vector<std::byte> memory(std::size_t{1} << 20);
  peer_id peer;
  transfer_handle out;
  {
    agent_options options;
    options.name = "b";
    options.backends = {how.kind};
    options.threads = how.threads;
    auto b = agent::create(std::move(options)).value();
    const auto lent = b->register_memory(memory, "lent", transport::access::read_write).value();
    peer = a.self->add_peer(b->describe().value()).value();
    const auto over = a.self->session(a.kv, peer, lent.value).value();
    out = a.self->move(direction::write, over, std::vector<segment>{{0, 0, memory.size()}}, {}, 0ms)
              .value();
    ASSERT_TRUE(testing::comes_true([&] {
      a.self->poll();
      b->poll();
      return a.self->status_of(out)->now != state::active;
    }));
    ASSERT_EQ(a.self->status_of(out)->now, state::done);
    // A reader is busy when the agent ends.
    ASSERT_TRUE(a.self->post(out, {}, 0ms));
  }
  std::memset(memory.data(), 0x77, memory.size());
  ASSERT_TRUE(testing::comes_true([&] {
    a.self->poll();
    return a.self->status_of(out)->now != state::active;
  }));
  ASSERT_TRUE(testing::comes_true([&] {
    a.self->poll();
    const auto events = a.self->take(100);
    return std::ranges::any_of(events, [&](const event& one) {
      return one.what == event_kind::peer_lost && one.who == peer && one.why;
    });
  }));
  for (const auto byte : memory) ASSERT_EQ(byte, std::byte{0x77});
  ASSERT_TRUE(a.self->post(out, {}, 0ms));
  EXPECT_EQ(a.self->wait(std::vector{out}, wait_for::any, long_time), 1U);
  EXPECT_EQ(a.self->status_of(out)->now, state::failed);
}

TEST_P(agents_test, bounds_answer_overloaded_and_lose_nothing) {
  agent_pair p{GetParam(), [](agent_options& o) {
                 o.max_transfers = 3;
                 o.max_peers = 1;
               }};
  std::vector<transfer_handle> kept;
  const std::vector<segment> some{{0, 0, 64}};
  const auto over = p.a.self->session(p.a.kv, p.b_of_a, p.b.kv.value).value();
  for (int i = 0; i < 3; ++i) {
    kept.push_back(p.a.self->move(direction::write, over, some, {}, 0ms).value());
  }
  EXPECT_EQ(code_of(p.a.self->move(direction::write, over, some, {}, 0ms)), errc::overloaded);
  for (const auto one : kept) EXPECT_EQ(p.ended(p.a, one).now, state::done);
  EXPECT_TRUE(p.a.self->release(kept.back()));
  EXPECT_TRUE(p.a.self->move(direction::write, over, some, {}, 0ms));
  const agent_node c{"c", GetParam()};
  EXPECT_EQ(code_of(p.a.self->add_peer(c.self->describe().value())), errc::overloaded);
}

TEST_P(agents_test, who_waits_hears_how_many_have_ended) {
  agent_pair p{GetParam()};
  const auto out = p.make_blocks(direction::write, 4, 4096);
  EXPECT_EQ(p.a.self->wait(std::vector{out}, wait_for::all, 0ms), 1U);  // it was never posted
  ASSERT_TRUE(p.a.self->post(out, {}, 0ms));
  ASSERT_EQ(p.ended(p.a, out).now, state::done);
  EXPECT_EQ(p.a.self->wait(std::vector{out, transfer_handle{99'999}}, wait_for::all, 0ms), 2U);
  EXPECT_EQ(p.a.self->wait({}, wait_for::any, 0ms), 0U);
}

}  // namespace troupe::io
