#include <poll.h>

#include "agents.hpp"

// Moves bytes over every backend.
namespace troupe::io {

INSTANTIATE_TEST_SUITE_P(every, agents_test, ::testing::ValuesIn(all_ways()), name_of);

using transport::direction;

TEST_P(agents_test, register_describe_write_notice_and_wait) {
  agent_pair p{GetParam()};
  p.a.fill(1);
  const auto over = p.a.self->session(p.a.kv, p.b_of_a, p.b.kv.value).value();
  const auto sent = p.a.self->move(direction::write, over, std::vector<segment>{{0, 4096, 65'536}},
                                   bytes_of("here it is"), 0ms);
  ASSERT_TRUE(sent) << to_string(sent.error());
  const auto done = p.ended(p.a, *sent);
  EXPECT_EQ(done.now, state::done) << (done.why ? to_string(*done.why) : "");
  EXPECT_EQ(done.bytes, 65'536U);
  EXPECT_TRUE(done.bad_entries.empty());
  std::vector<notice> came;
  ASSERT_TRUE(p.until([&] {
    came = p.b.self->take_notices(10);
    return !came.empty();
  }));
  EXPECT_EQ(came.front().from, "a");
  EXPECT_EQ(came.front().life, p.a_of_b);
  EXPECT_EQ(text_of(came.front().bytes), "here it is");
  EXPECT_EQ(std::memcmp(p.a.memory.data(), p.b.memory.data() + 4096, 65'536), 0);
  EXPECT_EQ(p.a.self->wait(std::vector{*sent}, wait_for::all, 0ms), 1U);
  EXPECT_TRUE(p.a.self->release(*sent));
  EXPECT_EQ(code_of(p.a.self->status_of(*sent)), errc::not_found);
}

TEST_P(agents_test, batches_of_any_size_are_written_and_read_back) {
  agent_pair p{GetParam()};
  for (const std::uint64_t count : {1, 3, 64, 4096}) {
    for (const auto merge : {merge_entries::no, merge_entries::yes}) {
      p.a.fill(static_cast<std::uint32_t>(count));
      std::vector<std::byte> written{p.a.memory.begin(), p.a.memory.end()};
      const auto out = p.make_blocks(direction::write, count, 1000, merge);
      ASSERT_TRUE(p.a.self->post(out, {}, 0ms));
      ASSERT_EQ(p.ended(p.a, out).now, state::done);
      ASSERT_EQ(std::memcmp(p.b.memory.data(), written.data(), count * 1000), 0);
      std::memset(p.a.memory.data(), 0, p.a.memory.size());
      const auto in = p.make_blocks(direction::read, count, 1000, merge);
      ASSERT_TRUE(p.a.self->post(in, bytes_of("read"), 0ms));
      ASSERT_EQ(p.ended(p.a, in).now, state::done);
      ASSERT_EQ(std::memcmp(p.a.memory.data(), written.data(), count * 1000), 0);
      EXPECT_EQ(p.notices(p.b, 1), std::vector<std::string>{"read"});
      EXPECT_TRUE(p.a.self->release(out));
      EXPECT_TRUE(p.a.self->release(in));
    }
  }
}

TEST_P(agents_test, strides_are_kept_on_both_sides) {
  agent_pair p{GetParam()};
  p.a.fill(2);
  std::memset(p.b.memory.data(), 0, p.b.memory.size());
  const auto over = p.a.self->session(p.a.kv, p.b_of_a, p.b.kv.value).value();
  const auto sent = p.a.self->move(direction::write, over,
                                   std::vector<segment>{{64, 32, 128, 1024, 512, 100}}, {}, 0ms);
  ASSERT_TRUE(sent);
  ASSERT_EQ(p.ended(p.a, *sent).now, state::done);
  for (std::size_t i = 0; i < 100; ++i) {
    ASSERT_EQ(std::memcmp(p.a.memory.data() + 64 + i * 1024, p.b.memory.data() + 32 + i * 512, 128),
              0);
    ASSERT_EQ(p.b.memory[32 + i * 512 + 128], std::byte{0});
  }
}

TEST_P(agents_test, a_transfer_is_posted_again_after_its_end_and_not_before) {
  agent_pair p{GetParam()};
  const auto out = p.make_blocks(direction::write, 64, 4096);
  for (std::uint32_t round = 0; round < 50; ++round) {
    p.a.fill(round);
    ASSERT_TRUE(p.a.self->post(out, bytes_of(std::to_string(round)), 0ms));
    const auto again = p.a.self->post(out, {}, 0ms);
    if (!again) {
      EXPECT_EQ(again.error().code, errc::overloaded);
      EXPECT_EQ(p.notices(p.b, 1), std::vector<std::string>{std::to_string(round)});
    }
    ASSERT_EQ(p.ended(p.a, out).now, state::done);
    ASSERT_EQ(std::memcmp(p.a.memory.data(), p.b.memory.data(), 64 * 4096), 0);
    static_cast<void>(p.b.self->take_notices(10));
  }
}

TEST_P(agents_test, a_caller_that_waits_copies_what_the_processor_copies) {
  agent_pair p{GetParam()};
  const auto out = p.make_blocks(direction::write, agent_node::size / 4096, 4096);
  int at_once = 0;
  for (std::uint32_t round = 0; round < 5; ++round) {
    p.a.fill(round);
    ASSERT_TRUE(p.a.self->post(out, bytes_of(std::to_string(round)), 0ms, then::waits));
    at_once += p.a.self->status_of(out).value().now == state::done ? 1 : 0;
    ASSERT_EQ(p.ended(p.a, out).now, state::done);
    EXPECT_EQ(p.notices(p.b, 1), std::vector<std::string>{std::to_string(round)});
    ASSERT_EQ(std::memcmp(p.a.memory.data(), p.b.memory.data(), agent_node::size), 0);
  }
  // Another thread may be reporting something else just then, and then reports the end as well.
  if (GetParam().kind == transport::backend_kind::shm) {
    EXPECT_GE(at_once, 2);
  }
}

TEST_P(agents_test, indices_choose_entries_of_prepared_lists) {
  agent_pair p{GetParam()};
  p.a.fill(3);
  std::vector<piece> local;
  std::vector<entry> remote;
  for (std::uint64_t i = 0; i < 100; ++i) {
    local.push_back({p.a.kv, i * 512, 512});
    remote.push_back({p.b.address(i * 512), 512});
  }
  const auto from = p.a.self->prepare(local).value();
  const auto to = p.a.self->prepare(p.b_of_a, remote).value();
  std::memset(p.b.memory.data(), 0, p.b.memory.size());
  const std::vector<std::uint32_t> here{5, 6, 7, 90};
  const std::vector<std::uint32_t> there{50, 51, 52, 0};
  const auto out = p.a.self->make(direction::write, from, here, to, there, merge_entries::yes);
  ASSERT_TRUE(out);
  ASSERT_TRUE(p.a.self->post(*out, {}, 0ms));
  ASSERT_EQ(p.ended(p.a, *out).now, state::done);
  for (std::size_t i = 0; i < here.size(); ++i) {
    EXPECT_EQ(
        std::memcmp(p.a.memory.data() + here[i] * 512, p.b.memory.data() + there[i] * 512, 512), 0);
  }
  EXPECT_EQ(p.b.memory[53 * 512], std::byte{0});
  const std::vector<std::uint32_t> bad{100};
  EXPECT_EQ(code_of(p.a.self->make(direction::write, from, bad, to, bad, merge_entries::no)),
            errc::out_of_range);
  EXPECT_EQ(code_of(p.a.self->make(direction::write, to, {}, from, {}, merge_entries::no)),
            errc::invalid_config);
  EXPECT_EQ(
      code_of(p.a.self->make(direction::write, from, {}, plan_id{999}, {}, merge_entries::no)),
      errc::not_found);
}

TEST_P(agents_test, local_entries_are_found_by_address_too) {
  agent_pair p{GetParam()};
  p.a.fill(4);
  const auto from =
      p.a.self->prepare(std::vector<entry>{{p.a.address(100), 300}, {p.a.address(1000), 5}});
  ASSERT_TRUE(from);
  const auto to = p.a.self->prepare(
      p.b_of_a, std::vector<entry>{{p.b.address(7), 300}, {p.b.address(2000), 5}});
  ASSERT_TRUE(to);
  const auto out = p.a.self->make(direction::write, *from, {}, *to, {}, merge_entries::no).value();
  ASSERT_TRUE(p.a.self->post(out, {}, 0ms));
  ASSERT_EQ(p.ended(p.a, out).now, state::done);
  EXPECT_EQ(std::memcmp(p.a.memory.data() + 100, p.b.memory.data() + 7, 300), 0);
  EXPECT_EQ(code_of(p.a.self->prepare(std::vector<entry>{{1, 1}})), errc::unknown_region);
  EXPECT_EQ(code_of(p.a.self->prepare(
                p.b_of_a, std::vector<entry>{{p.b.address(agent_node::size + 5000), 1}})),
            errc::unknown_region);
}

TEST_P(agents_test, an_agent_moves_between_its_own_memories_without_a_link) {
  agent_pair p{GetParam()};
  p.a.fill(5);
  const auto self = p.a.self->add_peer(p.a.self->describe().value()).value();
  const auto over = p.a.self->session(p.a.kv, self, p.a.kv.value).value();
  const auto sent = p.a.self->move(direction::write, over,
                                   std::vector<segment>{{0, 1 << 20, 65'536}}, bytes_of("me"), 0ms);
  ASSERT_TRUE(sent) << to_string(sent.error());
  EXPECT_EQ(p.ended(p.a, *sent).now, state::done);
  EXPECT_EQ(std::memcmp(p.a.memory.data(), p.a.memory.data() + (1 << 20), 65'536), 0);
  const auto came = p.a.self->take_notices(10);
  ASSERT_EQ(came.size(), 1U);
  EXPECT_EQ(came.front().from, "a");
  EXPECT_EQ(came.front().life, self);
}

TEST_P(agents_test, many_threads_post_at_once) {
  if (GetParam().threads == 0) GTEST_SKIP() << "nobody polls for them";
  agent_pair p{GetParam()};
  p.a.fill(6);
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (std::uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      const auto over = p.a.self->session(p.a.kv, p.b_of_a, p.b.kv.value).value();
      for (std::uint64_t i = 0; i < 100; ++i) {
        const auto at = (t * 100 + i) * 4096;
        const auto sent =
            p.a.self->move(direction::write, over, std::vector<segment>{{at, at, 4096}}, {}, 0ms);
        if (!sent || p.a.self->wait(std::vector{*sent}, wait_for::all, long_time) != 1 ||
            p.a.self->status_of(*sent)->now != state::done || !p.a.self->release(*sent)) {
          ++wrong;
        }
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(std::memcmp(p.a.memory.data(), p.b.memory.data(), 400 * 4096), 0);
}

TEST_P(agents_test, events_tell_of_ends_and_wake_whoever_watches_the_descriptor) {
  agent_pair p{GetParam()};
  const auto out = p.make_blocks(direction::write, 4, 4096);
  ASSERT_TRUE(p.a.self->post(out, {}, 0ms));
  std::vector<event> came;
  ASSERT_TRUE(p.until([&] {
    for (auto& one : p.a.self->take(10)) came.push_back(one);
    return !came.empty();
  }));
  EXPECT_EQ(came.front().what, event_kind::transfer_ended);
  EXPECT_EQ(came.front().which, out);
  EXPECT_TRUE(p.a.self->take(10).empty());
}

TEST_P(agents_test, transfers_that_are_released_leave_no_event_behind) {
  agent_pair p{GetParam()};
  ASSERT_TRUE(p.connected());
  const auto over = p.a.self->session(p.a.kv, p.b_of_a, p.b.kv.value).value();
  for (int i = 0; i < 1000; ++i) {
    const auto sent =
        p.a.self->move(direction::write, over, std::vector<segment>{{0, 0, 64}}, {}, 0ms).value();
    ASSERT_EQ(p.ended(p.a, sent).now, state::done);
    ASSERT_TRUE(p.a.self->release(sent));
  }
  EXPECT_EQ(p.a.self->report().events, 0U);
  pollfd readable{p.a.self->event_fd(), POLLIN, 0};
  EXPECT_EQ(::poll(&readable, 1, 0), 0);
  EXPECT_TRUE(p.a.self->take(10).empty());
}

TEST_P(agents_test, a_link_is_made_ahead_and_reported) {
  agent_pair p{GetParam()};
  ASSERT_TRUE(p.connected());
  const auto said = p.a.self->report();
  EXPECT_EQ(said.name, "a");
  ASSERT_EQ(said.peers.size(), 1U);
  EXPECT_EQ(said.peers.front().name, "b");
  EXPECT_EQ(said.peers.front().backend, GetParam().kind);
  EXPECT_EQ(said.peers.front().links, 1U);
  EXPECT_FALSE(said.peers.front().lost);
}

TEST(agent_report_test, names_every_backend_and_why_one_cannot_be_used) {
  const agent_node a{"a", all_ways().front()};
  const auto said = a.self->report();
  const auto shm =
      std::ranges::find(said.backends, transport::backend_kind::shm, &backend_report::kind);
  ASSERT_NE(shm, said.backends.end());
  EXPECT_TRUE(shm->usable) << shm->reason;
  EXPECT_EQ(said.backends.size(), 4U);
  for (const auto& one : said.backends) {
    EXPECT_TRUE(one.usable || !one.reason.empty()) << to_string(one.kind);
  }
}

}  // namespace troupe::io
