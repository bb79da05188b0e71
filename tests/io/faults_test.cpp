#include <array>

#include "troupe/io/descriptor.hpp"

#include "agents.hpp"
#include "peer_child.hpp"

// Peers in processes of their own: killed, stopped, started again.
namespace troupe::io {

using transport::direction;

namespace {

const std::chrono::milliseconds silence{500 * testing::slowness};

std::vector<way> ways_to_processes() {
  if (testing::have_verbs()) return {{transport::backend_kind::rdma, 1}};
  return {{transport::backend_kind::shm, 1}, {transport::backend_kind::tcp, 1}};
}

void notice_soon(agent_options& options) {
  options.peer_silence = silence;
  options.connect_timeout = 2000ms;
}

bool is_over(errc code) {
  constexpr std::array ends{errc::peer_lost, errc::link_broken, errc::peer_unreachable,
                            errc::aborted};
  return std::ranges::find(ends, code) != ends.end();
}

}  // namespace

class agent_faults : public ::testing::TestWithParam<way> {
 protected:
  [[nodiscard]] static std::string_view kind() { return to_string(GetParam().kind); }

  struct joined {
    peer_id who;
    plan_id over;
  };
  static joined join(agent_node& a, peer_child& with) {
    const auto described = with.descriptor();
    with.tell(a.self->describe(std::vector{a.kv}).value());
    const auto who = a.self->add_peer(described);
    EXPECT_TRUE(who) << (who ? "" : to_string(who.error()));
    const auto number = a.self->remote_memories(*who)->front().number;
    return {*who, a.self->session(a.kv, *who, number).value()};
  }
  static transfer_handle move_all(agent_node& a, plan_id over, direction dir) {
    return a.self->move(dir, over, std::vector<segment>{{0, 0, agent_node::size}}, {}, 0ms).value();
  }
  static status end_of(agent_node& a, transfer_handle which) {
    EXPECT_EQ(a.self->wait(std::vector{which}, wait_for::all, long_time), 1U);
    return a.self->status_of(which).value();
  }
  static bool hears_of_loss(agent_node& a, peer_id who) {
    return testing::comes_true([&] {
      const auto some = a.self->take(1000);
      return std::ranges::any_of(some, [&](const event& one) {
        return one.what == event_kind::peer_lost && one.who == who;
      });
    });
  }
};

INSTANTIATE_TEST_SUITE_P(every, agent_faults, ::testing::ValuesIn(ways_to_processes()), name_of);

TEST_P(agent_faults, a_peer_of_another_process_is_written_and_read) {
  agent_node a{"a", GetParam()};
  peer_child other{"b", kind(), 0, "serve"};
  const auto [who, over] = join(a, other);
  a.fill(1);
  const std::vector<std::byte> written{a.memory.begin(), a.memory.end()};
  ASSERT_EQ(end_of(a, move_all(a, over, direction::write)).now, state::done);
  std::memset(a.memory.data(), 0, a.memory.size());
  ASSERT_EQ(end_of(a, move_all(a, over, direction::read)).now, state::done);
  EXPECT_EQ(std::memcmp(a.memory.data(), written.data(), written.size()), 0);
}

TEST_P(agent_faults, a_killed_peer_is_lost_at_once_and_its_transfers_say_so) {
  agent_node a{"a", GetParam()};  // with a long peer silence
  peer_child other{"b", kind(), 0, "serve"};
  const auto [who, over] = join(a, other);
  ASSERT_EQ(end_of(a, move_all(a, over, direction::write)).now, state::done);
  std::vector<transfer_handle> sent;
  for (int i = 0; i < 8; ++i) sent.push_back(move_all(a, over, direction::write));
  other.kill();
  for (const auto one : sent) {
    const auto end = end_of(a, one);
    if (end.now == state::failed) {
      EXPECT_TRUE(is_over(end.why->code)) << to_string(*end.why);
    }
  }
  EXPECT_TRUE(hears_of_loss(a, who));
  const auto late = end_of(a, move_all(a, over, direction::write));
  ASSERT_EQ(late.now, state::failed);
  EXPECT_TRUE(is_over(late.why->code)) << to_string(*late.why);
}

TEST_P(agent_faults, a_stopped_peer_is_lost_after_its_silence_and_comes_back) {
  agent_node a{"a", GetParam(), notice_soon};
  peer_child other{"b", kind(), 0, "serve"};
  const auto both = join(a, other);
  const auto over = both.over;
  ASSERT_EQ(end_of(a, move_all(a, over, direction::write)).now, state::done);
  other.stop();
  const auto before = std::chrono::steady_clock::now();
  const auto held = move_all(a, over, direction::read);
  EXPECT_TRUE(hears_of_loss(a, both.who));
  EXPECT_GE(std::chrono::steady_clock::now() - before, silence / 2);
  const auto end = end_of(a, held);
  if (GetParam().kind == transport::backend_kind::tcp) {
    ASSERT_EQ(end.now, state::failed);  // no peer served it
    EXPECT_EQ(end.why->code, errc::peer_lost) << to_string(*end.why);
    EXPECT_THAT(end.why->message, ::testing::HasSubstr("nothing was heard"));
  }
  other.go_on();
  // The peer is the same incarnation: the next transfers reach it again.
  EXPECT_TRUE(testing::comes_true(
      [&] { return end_of(a, move_all(a, over, direction::write)).now == state::done; }));
}

TEST_P(agent_faults, a_transfer_to_a_stopped_peer_ends_by_its_deadline) {
  agent_node a{"a", GetParam()};  // with a long peer silence
  peer_child other{"b", kind(), 0, "serve"};
  const auto over = join(a, other).over;
  ASSERT_EQ(end_of(a, move_all(a, over, direction::write)).now, state::done);
  other.stop();
  for (const auto dir : {direction::read, direction::write}) {
    const auto held =
        a.self->move(dir, over, std::vector<segment>{{0, 0, agent_node::size}}, {}, 200ms).value();
    const auto end = end_of(a, held);
    if (GetParam().kind != transport::backend_kind::tcp) continue;  // moves without the peer's help
    ASSERT_EQ(end.now, state::failed);
    EXPECT_EQ(end.why->code, errc::deadline) << to_string(*end.why);
    EXPECT_FALSE(end.bad_entries.empty());
  }
  other.go_on();
  EXPECT_TRUE(testing::comes_true(
      [&] { return end_of(a, move_all(a, over, direction::write)).now == state::done; }));
}

TEST_P(agent_faults, a_peer_that_starts_again_at_the_same_port_is_another_life) {
  agent_node a{"a", GetParam()};
  auto first = std::make_unique<peer_child>("b", kind(), 0, "serve");
  const auto described = first->descriptor();
  const auto port = descriptor::decode(described)->port;
  first->tell(a.self->describe(std::vector{a.kv}).value());
  const auto who = a.self->add_peer(described).value();
  const auto over =
      a.self->session(a.kv, who, a.self->remote_memories(who)->front().number).value();
  ASSERT_EQ(end_of(a, move_all(a, over, direction::write)).now, state::done);
  first->kill();
  ASSERT_TRUE(hears_of_loss(a, who));
  peer_child again{"b", kind(), port, "serve"};
  const auto [now, by] = join(a, again);
  EXPECT_NE(now, who);
  const auto old = end_of(a, move_all(a, over, direction::write));
  ASSERT_EQ(old.now, state::failed);
  EXPECT_EQ(old.why->code, errc::stale_incarnation) << to_string(*old.why);
  EXPECT_EQ(code_of(a.self->move(direction::write, over, std::vector<segment>{{0, 0, 1}}, {}, 0ms)),
            errc::stale_incarnation);
  EXPECT_EQ(end_of(a, move_all(a, by, direction::write)).now, state::done);
}

TEST_P(agent_faults, memory_is_taken_back_from_a_peer_that_writes_and_from_one_that_was_killed) {
  for (const bool killed : {false, true}) {
    agent_node a{"a", GetParam()};
    const auto part = a.memory;
    const auto lent = a.self->register_memory(part, "lent", transport::access::write).value();
    peer_child other{"b", kind(), 0, "write"};
    const auto described = other.descriptor();
    other.tell(a.self->describe(std::vector{lent}).value());
    // The peer is in the middle of the transfer once these bytes are here.
    ASSERT_TRUE(testing::comes_true([&] {
      return *const_cast<volatile std::byte*>(part.data() + part.size() - 1) == std::byte{0xbb};
    }));
    if (killed) other.kill();
    const auto gone = a.self->deregister(lent, long_time);
    ASSERT_TRUE(gone) << to_string(gone.error());
    std::memset(part.data(), 0x11, part.size());
    if (!killed) {
      EXPECT_EQ(other.line(), "failed grant_revoked");
    }
    for (const auto byte : part) ASSERT_EQ(byte, std::byte{0x11});
  }
}

TEST_P(agent_faults, memory_is_not_free_while_a_stopped_peer_may_be_in_it) {
  agent_node a{"a", GetParam()};
  const auto lent = a.self->register_memory(a.memory, "lent", transport::access::write).value();
  peer_child other{"b", kind(), 0, "write"};
  const auto described = other.descriptor();
  other.tell(a.self->describe(std::vector{lent}).value());
  ASSERT_TRUE(testing::comes_true([&] {
    return *const_cast<volatile std::byte*>(a.memory.data() + a.memory.size() - 1) ==
           std::byte{0xbb};
  }));
  other.stop();
  const auto first = a.self->deregister(lent, 50ms);
  if (first) {
    std::memset(a.memory.data(), 0x22, a.memory.size());
  } else {
    // The peer stopped in the middle of a copy: its memory can be taken back only once it goes on
    // or dies.
    EXPECT_EQ(first.error().code, errc::deadline) << to_string(first.error());
    other.go_on();
    const auto then = a.self->deregister(lent, long_time);
    ASSERT_TRUE(then) << to_string(then.error());
    std::memset(a.memory.data(), 0x22, a.memory.size());
  }
  other.go_on();
  EXPECT_THAT(other.line(), ::testing::StartsWith("failed"));
  for (const auto byte : a.memory) ASSERT_EQ(byte, std::byte{0x22});
}

}  // namespace troupe::io
