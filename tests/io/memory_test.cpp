#include "troupe/io/descriptor.hpp"

#include "agents.hpp"

// Memory: rights, overlaps, and deregistration in the middle of transfers.
namespace troupe::io {

using transport::access;
using transport::direction;

TEST_P(agents_test, rights_are_kept) {
  agent_pair p{GetParam()};
  const auto part = p.b.memory.first(4096);
  const auto read_only = p.b.self->register_memory(part, "for readers", access::read).value();
  const auto described = p.b.self->describe(std::vector{read_only}).value();
  ASSERT_TRUE(p.a.self->add_peer(described));
  const auto over = p.a.self->session(p.a.kv, p.b_of_a, read_only.value).value();
  const std::vector<segment> some{{0, 0, 64}};
  EXPECT_EQ(code_of(p.a.self->move(direction::write, over, some, {}, 0ms)), errc::unauthorized);
  const auto in = p.a.self->move(direction::read, over, some, {}, 0ms);
  ASSERT_TRUE(in);
  EXPECT_EQ(p.ended(p.a, *in).now, state::done);
  EXPECT_EQ(
      code_of(p.a.self->move(direction::read, over, std::vector<segment>{{0, 4095, 2}}, {}, 0ms)),
      errc::out_of_range);
}

TEST_P(agents_test, only_what_was_described_can_be_named) {
  const auto how = GetParam();
  agent_node a{"a", how};
  agent_node b{"b", how};
  const auto other = b.self->allocate(4096, "not described", access::read_write).value();
  const auto peer = a.self->add_peer(b.self->describe(std::vector{b.kv}).value()).value();
  ASSERT_EQ(a.self->remote_memories(peer)->size(), 1U);
  EXPECT_EQ(a.self->remote_memories(peer)->front().number, b.kv.value);
  EXPECT_EQ(a.self->remote_memories(peer)->front().address, b.address());
  EXPECT_EQ(code_of(a.self->session(a.kv, peer, other.value)), errc::not_found);
  EXPECT_EQ(code_of(b.self->describe(std::vector{memory_id{4711}})), errc::not_found);
}

TEST_P(agents_test,
       a_memory_is_deregistered_while_the_peer_writes_into_it_and_nothing_lands_later) {
  agent_pair p{GetParam()};
  std::memset(p.a.memory.data(), 0xee, p.a.memory.size());
  for (int round = 0; round < 4; ++round) {
    const auto part = p.b.memory.first(std::size_t{1} << 20);
    const auto lent = p.b.self->register_memory(part, "lent", access::write).value();
    ASSERT_TRUE(p.a.self->add_peer(p.b.self->describe(std::vector{lent}).value()));
    const auto over = p.a.self->session(p.a.kv, p.b_of_a, lent.value).value();
    std::vector<transfer_handle> sent;
    for (int i = 0; i < 6; ++i) {
      sent.push_back(
          p.a.self->move(direction::write, over, std::vector<segment>{{0, 0, part.size()}}, {}, 0ms)
              .value());
    }
    for (int i = 0; i < round * 20; ++i) {  // cut at different places
      p.a.self->poll();
      p.b.self->poll();
    }
    ASSERT_TRUE(p.until([&] { return p.b.self->deregister(lent, 0ms).has_value(); }));
    std::memset(part.data(), 0x11, part.size());
    for (const auto one : sent) {
      const auto end = p.ended(p.a, one);
      if (end.now == state::failed) {
        EXPECT_EQ(end.why->code, errc::grant_revoked) << to_string(*end.why);
        EXPECT_EQ(end.bad_entries, std::vector<std::uint32_t>{0});
      }
    }
    const auto late = p.a.self->move(direction::write, over, std::vector<segment>{{0, 0, 64}},
                                     bytes_of("no"), 0ms);
    ASSERT_TRUE(late);
    const auto end = p.ended(p.a, *late);
    EXPECT_EQ(end.now, state::failed);
    EXPECT_EQ(end.why->code, errc::grant_revoked);
    for (const auto byte : part) ASSERT_EQ(byte, std::byte{0x11}) << "round " << round;
    EXPECT_TRUE(p.b.self->take_notices(10).empty());
  }
  // The overlapping memory stays usable. (By address, the deregistered one might be found.)
  const auto kv = p.a.self->session(p.a.kv, p.b_of_a, p.b.kv.value).value();
  const auto out =
      p.a.self->move(direction::write, kv, std::vector<segment>{{0, 0, 4096}}, {}, 0ms);
  ASSERT_TRUE(out);
  EXPECT_EQ(p.ended(p.a, *out).now, state::done);
}

TEST_P(agents_test, a_memory_is_deregistered_while_this_agent_moves_it) {
  agent_pair p{GetParam()};
  for (const auto dir : {direction::write, direction::read}) {
    std::vector<std::byte> own(std::size_t{2} << 20, std::byte{0x33});
    const auto lent = p.a.self->register_memory(own, "own", access::read).value();
    const auto over = p.a.self->session(lent, p.b_of_a, p.b.kv.value).value();
    std::vector<transfer_handle> sent;
    for (int i = 0; i < 4; ++i) {
      sent.push_back(
          p.a.self->move(dir, over, std::vector<segment>{{0, 0, own.size()}}, {}, 0ms).value());
    }
    ASSERT_TRUE(p.until([&] { return p.a.self->deregister(lent, 0ms).has_value(); }));
    std::memset(own.data(), 0x44, own.size());
    for (const auto one : sent) {
      const auto end = p.ended(p.a, one);
      if (end.now == state::failed) {
        EXPECT_EQ(end.why->code, errc::aborted) << to_string(*end.why);
      }
      EXPECT_EQ(code_of(p.a.self->post(one, {}, 0ms)), errc::aborted);
    }
    EXPECT_EQ(code_of(p.a.self->session(lent, p.b_of_a, p.b.kv.value)), errc::not_found);
    for (const auto byte : own) ASSERT_EQ(byte, std::byte{0x44}) << "a read landed later";
  }
}

TEST_P(agents_test, memories_that_overlap_are_taken_back_one_by_one) {
  agent_pair p{GetParam()};
  const auto part = p.b.memory.first(65'536);
  const auto one = p.b.self->register_memory(part, "one", access::read_write).value();
  const auto equal = p.b.self->register_memory(part, "equal", access::read_write).value();
  ASSERT_TRUE(p.a.self->add_peer(p.b.self->describe().value()));
  const auto by_one = p.a.self->session(p.a.kv, p.b_of_a, one.value).value();
  const auto by_equal = p.a.self->session(p.a.kv, p.b_of_a, equal.value).value();
  const auto try_it = [&](plan_id over) {
    const auto sent =
        p.a.self->move(direction::write, over, std::vector<segment>{{0, 0, 4096}}, {}, 0ms);
    if (!sent) return sent.error().code;
    const auto end = p.ended(p.a, *sent);
    return end.why ? end.why->code : errc{};
  };
  EXPECT_EQ(try_it(by_one), errc{});
  EXPECT_EQ(try_it(by_equal), errc{});
  ASSERT_TRUE(p.until([&] { return p.b.self->deregister(one, 0ms).has_value(); }));
  EXPECT_EQ(try_it(by_one), errc::grant_revoked);
  EXPECT_EQ(try_it(by_equal), errc{});
  EXPECT_EQ(code_of(p.b.self->deregister(one, 0ms)), errc::not_found);
  EXPECT_EQ(code_of(p.b.self->bytes(one)), errc::not_found);
}

TEST_P(agents_test, memories_that_overlap_are_taken_back_at_once) {
  if (GetParam().threads == 0) GTEST_SKIP() << "who deregisters makes the progress itself";
  const agent_node b{"b", GetParam()};
  std::vector<std::byte> memory(65'536);
  for (int round = 0; round < 50; ++round) {
    const auto one = b.self->register_memory(memory, "one", access::read).value();
    const auto equal = b.self->register_memory(memory, "equal", access::read).value();
    std::thread other{[&] { EXPECT_TRUE(b.self->deregister(one, long_time)); }};
    EXPECT_TRUE(b.self->deregister(equal, long_time));
    other.join();
  }
  // Its region went with the last memory in it, so the next registration starts a region of its
  // own.
  const auto next = b.self->register_memory(std::span{memory}.last(4096), "next", access::read);
  ASSERT_TRUE(next) << to_string(next.error());
  const auto said = descriptor::decode(b.self->describe(std::vector{*next}).value()).value();
  EXPECT_EQ(said.memories.front().parts.front().offset, 0U);
}

TEST_P(agents_test, whoever_deregisters_hears_of_peers_that_leave_meanwhile) {
  if (GetParam().threads == 0) GTEST_SKIP() << "who deregisters makes the progress itself";
  agent_node b{"b", GetParam()};
  const auto part = b.memory.first(std::size_t{1} << 20);
  for (int round = 0; round < 20; ++round) {
    const auto lent = b.self->register_memory(part, "lent", access::write).value();
    agent_node a{"a", GetParam()};
    const auto peer = a.self->add_peer(b.self->describe(std::vector{lent}).value()).value();
    const auto over = a.self->session(a.kv, peer, lent.value).value();
    for (int i = 0; i < 4; ++i) {
      const std::vector<segment> all{{0, 0, part.size()}};
      ASSERT_TRUE(a.self->move(direction::write, over, all, {}, 0ms));
    }
    const auto before = std::chrono::steady_clock::now();
    std::thread leaves{[&] { EXPECT_TRUE(a.self->remove_peer(peer)); }};
    EXPECT_TRUE(b.self->deregister(lent, 2 * testing::wait_limit));
    leaves.join();
    ASSERT_LT(std::chrono::steady_clock::now() - before, testing::wait_limit);
  }
}

TEST_P(agents_test, by_address_the_memory_that_was_described_last_is_used) {
  agent_pair p{GetParam()};
  const auto learn = [&] { EXPECT_TRUE(p.a.self->add_peer(p.b.self->describe().value())); };
  const auto writes_there = [&] {
    const auto from = p.a.self->prepare(std::vector<piece>{{p.a.kv, 0, 64}}).value();
    const auto to = p.a.self->prepare(p.b_of_a, std::vector<entry>{{p.b.address(4096), 64}});
    const auto out =
        p.a.self->make(direction::write, from, {}, to.value(), {}, merge_entries::no).value();
    EXPECT_TRUE(p.a.self->post(out, {}, 0ms));
    return p.ended(p.a, out);
  };
  const auto old =
      p.b.self->register_memory(p.b.memory.subspan(4096, 4096), "old", access::write).value();
  learn();
  EXPECT_EQ(writes_there().now, state::done);
  ASSERT_TRUE(p.until([&] { return p.b.self->deregister(old, 0ms).has_value(); }));
  // A newer memory that begins before the dead one.
  const auto now =
      p.b.self->register_memory(p.b.memory.first(16'384), "now", access::write).value();
  learn();
  EXPECT_EQ(writes_there().now, state::done);
  // Until the first refusal the agent does not know that it is dead; then the older memories serve.
  ASSERT_TRUE(p.until([&] { return p.b.self->deregister(now, 0ms).has_value(); }));
  const auto refused = writes_there();
  ASSERT_EQ(refused.now, state::failed);
  EXPECT_EQ(refused.why->code, errc::grant_revoked) << to_string(*refused.why);
  EXPECT_TRUE(p.until([&] { return writes_there().now == state::done; }));
}

TEST_P(agents_test, nothing_is_registered_from_nothing) {
  agent_node a{"a", GetParam()};
  EXPECT_EQ(code_of(a.self->register_memory({}, "none", access::read)), errc::invalid_config);
  EXPECT_EQ(code_of(a.self->register_memory(a.memory, "rights", access{9})), errc::invalid_config);
  EXPECT_EQ(code_of(a.self->allocate(0, "none", access::read)), errc::invalid_config);
  for (const auto size : {SIZE_MAX, SIZE_MAX - a.address() + 1}) {
    const auto said = a.self->register_memory({a.memory.data(), size}, "round", access::read);
    ASSERT_EQ(code_of(said), errc::invalid_config);
    EXPECT_THAT(said.error().message, ::testing::HasSubstr(std::to_string(a.address())));
    EXPECT_THAT(said.error().message, ::testing::HasSubstr(std::to_string(size)));
  }
  EXPECT_EQ(code_of(a.self->prepare(std::vector<piece>{{a.kv, agent_node::size, 1}})),
            errc::out_of_range);
  EXPECT_EQ(code_of(a.self->prepare(std::vector<piece>{{memory_id{99}, 0, 1}})), errc::not_found);
}

// Each has a grant of its own, and questions beyond the limit are asked as answers come.
TEST_P(agents_test, a_transfer_may_touch_more_memories_than_are_asked_for_at_once) {
  constexpr std::size_t memories = 600;
  constexpr std::size_t length = 4096;
  agent_pair p{GetParam()};
  for (std::size_t i = 0; i < memories; ++i) {
    const auto part = p.b.memory.subspan(i * length, length);
    ASSERT_TRUE(p.b.self->register_memory(part, "part", transport::access::write));
  }
  ASSERT_TRUE(p.a.self->add_peer(p.b.self->describe().value()));
  p.a.fill(1);
  const auto out = p.make_blocks(direction::write, memories, length);
  ASSERT_TRUE(p.a.self->post(out, {}, 0ms));
  const auto end = p.ended(p.a, out);
  ASSERT_EQ(end.now, state::done) << (end.why ? to_string(*end.why) : "");
  EXPECT_EQ(p.a.self->report().peers.front().grants, memories);
  EXPECT_EQ(std::memcmp(p.a.memory.data(), p.b.memory.data(), memories * length), 0);
}

}  // namespace troupe::io
