#include <atomic>

#include "agents.hpp"

// Notices: in order, counted, never dropped.
namespace troupe::io {

using transport::direction;

TEST_P(agents_test, notices_without_bytes_come_in_order) {
  agent_pair p{GetParam()};
  for (int i = 0; i < 40; ++i) {
    ASSERT_TRUE(p.a.self->notify(p.b_of_a, bytes_of(std::to_string(i))));
  }
  const auto came = p.notices(p.b, 40);
  ASSERT_EQ(came.size(), 40U);
  for (int i = 0; i < 40; ++i) EXPECT_EQ(came[static_cast<std::size_t>(i)], std::to_string(i));
}

TEST_P(agents_test, who_was_greeted_answers_without_a_descriptor_of_its_own) {
  const auto how = GetParam();
  agent_node a{"a", how};
  agent_node b{"b", how};
  const auto b_of_a = a.self->add_peer(b.self->describe().value()).value();
  ASSERT_TRUE(a.self->notify(b_of_a, bytes_of("hello")));
  const auto until = [&](const std::function<bool()>& done) {
    return testing::comes_true([&] {
      a.self->poll();
      b.self->poll();
      return done();
    });
  };
  std::vector<notice> came;
  ASSERT_TRUE(until([&] {
    came = b.self->take_notices(1);
    return !came.empty();
  }));
  ASSERT_TRUE(b.self->notify(came.front().life, bytes_of("hello back")));
  ASSERT_TRUE(until([&] {
    came = a.self->take_notices(1);
    return !came.empty();
  }));
  EXPECT_EQ(text_of(came.front().bytes), "hello back");
  EXPECT_EQ(came.front().from, "b");
}

TEST_P(agents_test, who_is_not_read_is_not_flooded_and_goes_on_when_it_is) {
  constexpr std::size_t room = 64;
  agent_pair p{GetParam(), [](agent_options& o) { o.max_notices = room; }};
  ASSERT_TRUE(p.connected());
  std::size_t sent = 0;
  const auto out = p.make_blocks(direction::write, 1, 64);
  while (true) {
    // Both ways of sending a notice count.
    const auto said = sent % 2 == 0 ? p.a.self->notify(p.b_of_a, bytes_of(std::to_string(sent)))
                                    : p.a.self->post(out, bytes_of(std::to_string(sent)), 0ms);
    if (!said) {
      EXPECT_EQ(said.error().code, errc::overloaded);
      break;
    }
    ++sent;
    ASSERT_LE(sent, room);
    if (sent % 2 == 0) {
      ASSERT_EQ(p.ended(p.a, out).now, state::done);
    }
  }
  EXPECT_EQ(sent, room);
  EXPECT_EQ(p.notices(p.b, room).size(), room);
  // The count of taken notices comes without a request.
  ASSERT_TRUE(p.until([&] { return p.a.self->notify(p.b_of_a, bytes_of("again")).has_value(); }));
  EXPECT_EQ(p.notices(p.b, 1), std::vector<std::string>{"again"});
}

TEST_P(agents_test, a_notice_is_never_seen_before_its_bytes) {
  agent_pair p{GetParam()};
  std::memset(p.b.memory.data(), 0, p.b.memory.size());
  const auto out = p.make_blocks(direction::write, 16, 65'536);
  for (unsigned round = 1; round < 40; ++round) {
    std::memset(p.a.memory.data(), static_cast<int>(round), 16 * 65'536);
    ASSERT_TRUE(p.a.self->post(out, bytes_of("r"), 0ms));
    ASSERT_EQ(p.notices(p.b, 1).size(), 1U);
    for (std::size_t i = 0; i < 16; ++i) {
      ASSERT_EQ(p.b.memory[i * 65'536], static_cast<std::byte>(round));
      ASSERT_EQ(p.b.memory[i * 65'536 + 65'535], static_cast<std::byte>(round));
    }
    ASSERT_EQ(p.ended(p.a, out).now, state::done);
  }
}

TEST_P(agents_test, notices_that_were_cancelled_do_not_count_for_ever) {
  constexpr std::size_t room = 64;
  agent_pair p{GetParam(), [](agent_options& o) { o.max_notices = room; }};
  ASSERT_TRUE(p.connected());
  const auto out = p.make_blocks(direction::write, 16, 65'536);
  for (std::size_t i = 0; i < 3 * room; ++i) {
    ASSERT_TRUE(p.until([&] {
      static_cast<void>(p.b.self->take_notices(room));
      return p.a.self->post(out, bytes_of("n"), 0ms).has_value();
    })) << "after "
        << i;
    ASSERT_TRUE(p.a.self->cancel(out));
    const auto end = p.ended(p.a, out);
    ASSERT_TRUE(end.now == state::cancelled || end.now == state::done);
  }
}

TEST_P(agents_test, an_agent_s_own_notices_have_a_room_of_their_own) {
  constexpr std::size_t room = 64;
  agent_pair p{GetParam(), [](agent_options& o) { o.max_notices = room; }};
  const auto self = p.b.self->add_peer(p.b.self->describe().value()).value();
  for (std::size_t i = 0; i < room; ++i) {
    ASSERT_TRUE(p.a.self->notify(p.b_of_a, bytes_of("of a")));
  }
  ASSERT_TRUE(p.until([&] {
    const auto peers = p.b.self->report().peers;
    return std::ranges::any_of(peers,
                               [](const peer_report& one) { return one.notices_unread == room; });
  }));
  // Room taken by notices of others is not this sender's.
  for (std::size_t i = 0; i < room; ++i) ASSERT_TRUE(p.b.self->notify(self, bytes_of("own")));
  EXPECT_EQ(code_of(p.b.self->notify(self, bytes_of("own"))), errc::overloaded);
  const auto over = p.b.self->session(p.b.kv, self, p.b.kv.value).value();
  const std::vector<segment> some{{0, 4096, 64}};
  EXPECT_EQ(code_of(p.b.self->move(direction::write, over, some, bytes_of("own"), 0ms)),
            errc::overloaded);
  EXPECT_EQ(p.notices(p.b, 2 * room).size(), 2 * room);
  EXPECT_TRUE(p.b.self->move(direction::write, over, some, bytes_of("own"), 0ms));
  EXPECT_EQ(p.notices(p.b, 1).size(), 1U);
}

TEST_P(agents_test, room_is_told_of_by_bytes_as_well) {
  constexpr std::size_t bytes = std::size_t{1} << 20;  // the minimum
  agent_pair p{GetParam(), [](agent_options& o) { o.max_notice_bytes = bytes; }};
  ASSERT_TRUE(p.connected());
  const std::vector<std::byte> big(bytes / 16);
  for (int i = 0; i < 16; ++i) ASSERT_TRUE(p.a.self->notify(p.b_of_a, big));
  EXPECT_EQ(code_of(p.a.self->notify(p.b_of_a, big)), errc::overloaded);
  ASSERT_TRUE(p.until([&] { return p.b.self->report().peers.front().notices_unread == 16; }));
  // Half of the room, although far fewer than the 65,536 notices allowed.
  EXPECT_EQ(p.b.self->take_notices(8).size(), 8U);
  EXPECT_TRUE(p.until([&] { return p.a.self->notify(p.b_of_a, big).has_value(); }));
}

TEST_P(agents_test, nothing_comes_from_a_peer_that_was_removed) {
  if (GetParam().threads == 0) GTEST_SKIP() << "nobody polls while the test waits";
  agent_pair p{GetParam()};
  for (int round = 0; round < 10; ++round) {
    std::atomic<bool> over{false};
    std::thread talks{[&] {
      while (!over) static_cast<void>(p.a.self->notify(p.b_of_a, bytes_of("n")));
    }};
    EXPECT_TRUE(p.until([&] { return !p.b.self->take_notices(1).empty(); }));
    EXPECT_TRUE(p.b.self->remove_peer(p.a_of_b));
    std::this_thread::sleep_for(1ms);
    for (const auto& one : p.b.self->take_notices(1'000'000)) EXPECT_NE(one.life, p.a_of_b);
    over = true;
    talks.join();
    p.a_of_b = p.b.self->add_peer(p.a.self->describe().value()).value();
  }
}

TEST_P(agents_test, what_is_too_long_for_a_notice_is_refused) {
  agent_pair p{GetParam()};
  const std::vector<std::byte> most(agent::max_notice_size, std::byte{7});
  const std::vector<std::byte> more(agent::max_notice_size + 1);
  EXPECT_EQ(code_of(p.a.self->notify(p.b_of_a, more)), errc::out_of_range);
  const auto out = p.make_blocks(direction::write, 1, 64);
  EXPECT_EQ(code_of(p.a.self->post(out, more, 0ms)), errc::out_of_range);
  ASSERT_TRUE(p.a.self->post(out, most, 0ms));
  EXPECT_EQ(p.ended(p.a, out).now, state::done);
  EXPECT_EQ(p.notices(p.b, 1).front().size(), most.size());
  EXPECT_EQ(code_of(p.a.self->notify(peer_id{4711}, {})), errc::not_found);
}

TEST_P(agents_test, a_program_can_wait_for_notices_and_takes_no_event_by_it) {
  agent_pair p{GetParam()};
  EXPECT_FALSE(p.b.self->wait_for_notices(1ms));
  ASSERT_TRUE(p.a.self->notify(p.b_of_a, bytes_of("came")));
  ASSERT_TRUE(p.until([&] { return p.b.self->wait_for_notices(1ms); }));
  EXPECT_TRUE(p.b.self->wait_for_notices(0ms)) << "nobody has taken it";
  const auto events = p.b.self->take(10);
  EXPECT_TRUE(std::ranges::any_of(
      events, [](const event& one) { return one.what == event_kind::notices_wait; }));
  EXPECT_EQ(text_of(p.b.self->take_notices(10).at(0).bytes), "came");
  EXPECT_FALSE(p.b.self->wait_for_notices(0ms));
}

TEST_P(agents_test, who_waits_for_a_notice_is_woken_by_it) {
  const auto how = GetParam();
  agent_node a{"a", how};
  const auto self = a.self->add_peer(a.self->describe().value()).value();
  std::atomic<bool> came{false};
  std::thread waits{[&] { came = a.self->wait_for_notices(long_time); }};
  ASSERT_TRUE(a.self->notify(self, bytes_of("to myself")));
  waits.join();
  EXPECT_TRUE(came);
}

TEST_P(agents_test,
       the_last_notice_of_an_agent_that_ends_arrives_also_where_its_link_has_many_lanes) {
  const auto how = GetParam();
  if (how.threads == 0) GTEST_SKIP() << "nobody polls an agent that ends";
  agent_node b{"b", how, [](agent_options& o) { o.lanes = 8; }};
  for (int round = 0; round < 40; ++round) {
    {
      const agent_node a{"a", how, [](agent_options& o) { o.lanes = 8; }};
      const auto peer = a.self->add_peer(b.self->describe().value()).value();
      ASSERT_TRUE(a.self->connect(peer, long_time));
      ASSERT_TRUE(a.self->notify(peer, bytes_of("the last")));
    }
    ASSERT_TRUE(b.self->wait_for_notices(testing::wait_limit / 4)) << "round " << round;
    EXPECT_EQ(text_of(b.self->take_notices(1).at(0).bytes), "the last");
  }
}

}  // namespace troupe::io
