#include "agents.hpp"
#include "broken_sockets.hpp"

// Links that break while both agents live on and still hear of each other.
namespace troupe::io {

using transport::direction;

namespace {

const way by_tcp{transport::backend_kind::tcp, 1};
constexpr std::size_t room = 64;

void little_room(agent_options& options) {
  options.max_notices = room;
}

bool is_up(const agent_pair& p) {
  return p.a.self->report().peers.front().backend.has_value();
}

void break_link(const agent_pair& p) {
  EXPECT_TRUE(p.until([&] { return is_up(p); }));
  EXPECT_GT(break_sockets(p.b.self->report().data_port), 0);
  EXPECT_TRUE(p.until([&] { return !is_up(p); }));
}

std::uint64_t unread(const agent_node& at) {
  return at.self->report().peers.front().notices_unread;
}

}  // namespace

TEST(broken_links_test, transfers_go_on_over_the_next_link) {
  agent_pair p{by_tcp};
  const auto out = p.make_blocks(direction::write, 16, 65'536);
  const auto arrives = [&] {
    return p.a.self->post(out, {}, 0ms).has_value() && p.ended(p.a, out).now == state::done;
  };
  ASSERT_TRUE(arrives());
  for (std::uint32_t round = 1; round < 4; ++round) {
    ASSERT_TRUE(p.a.self->post(out, {}, 0ms));
    break_link(p);
    const auto cut = p.ended(p.a, out);
    EXPECT_TRUE(cut.now == state::failed || cut.now == state::done);
    p.a.fill(round);
    ASSERT_TRUE(p.until(arrives));
    EXPECT_EQ(std::memcmp(p.a.memory.data(), p.b.memory.data(), 16 * 65'536), 0);
    EXPECT_EQ(p.a.self->report().peers.front().links, round + 1);
  }
  for (const auto& one : p.a.self->take(100)) EXPECT_NE(one.what, event_kind::peer_lost);
}

TEST(broken_links_test, room_is_found_again_that_became_free_while_there_was_no_link) {
  agent_pair p{by_tcp, little_room};
  ASSERT_TRUE(p.connected());
  for (std::size_t i = 0; i < room; ++i) ASSERT_TRUE(p.a.self->notify(p.b_of_a, bytes_of("n")));
  EXPECT_EQ(code_of(p.a.self->notify(p.b_of_a, bytes_of("more"))), errc::overloaded);
  ASSERT_TRUE(p.until([&] { return unread(p.b) == room; }));
  break_link(p);
  EXPECT_EQ(p.notices(p.b, room).size(), room);
  // Without a link nothing announces that there is room again. A refused `notify` makes a link,
  // over which the agent hears of it.
  ASSERT_TRUE(p.until([&] { return p.a.self->notify(p.b_of_a, bytes_of("again")).has_value(); }));
  EXPECT_EQ(p.notices(p.b, 1), std::vector<std::string>{"again"});
}

TEST(broken_links_test, notices_that_may_be_lost_with_a_link_are_told_of) {
  agent_pair p{by_tcp};
  ASSERT_TRUE(p.connected());
  std::vector<event> came;
  ASSERT_TRUE(p.until([&] {
    for (int i = 0; i < 3; ++i) EXPECT_TRUE(p.a.self->notify(p.b_of_a, bytes_of("n")));
    break_link(p);
    came = p.a.self->take(10);
    return !came.empty();  // the peer reports its count over a new link, which may have come first
  }));
  ASSERT_EQ(came.size(), 1U);
  EXPECT_EQ(came.front().what, event_kind::notices_lost);
  EXPECT_EQ(came.front().who, p.b_of_a);
}

TEST(broken_links_test, notices_that_were_lost_with_a_link_take_no_room_for_ever) {
  agent_pair p{by_tcp, little_room};
  ASSERT_TRUE(p.connected());
  const auto say = [&] {
    static_cast<void>(p.b.self->take_notices(room));
    return p.a.self->notify(p.b_of_a, bytes_of("n")).has_value();
  };
  for (int round = 0; round < 6; ++round) {
    for (std::size_t i = 0; i < room / 2; ++i) ASSERT_TRUE(p.until(say));
    break_link(p);
  }
  for (std::size_t i = 0; i < 3 * room; ++i) ASSERT_TRUE(p.until(say)) << "after " << i;
}

}  // namespace troupe::io
