// How long blocks are held: for a peer that is alive, however long it waits in line, and not for a
// dead one.

#include <gmock/gmock.h>

#include "fault_fixture.hpp"

namespace troupe::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr auto lease = 1s;

class leases : public fault {
 protected:
  explicit leases(const std::string& length = "1s", const std::string& window = "0s")
      : fault{with_lease(length, window)} {}
  static cluster_options with_lease(const std::string& length, const std::string& window) {
    auto options = patient(GetParam());
    options.source_lease = length;
    options.retry_window = window;
    return options;
  }
  /// A send that is held for decode-0, which is known to be up.
  operation_id send_for_decode(const std::string& request, kvcache::allocation& blocks) {
    events->listen_for(300ms * slowness);
    auto got = node->allocate_blocks(4);
    EXPECT_TRUE(got);
    blocks = got.value_or(kvcache::allocation{});
    send_spec spec;
    spec.request = request;
    spec.blocks = blocks.blocks;
    spec.held_for = {"decode-0"};
    auto sent = node->send(std::move(spec));
    EXPECT_TRUE(sent) << to_string(sent.error());
    return sent.value_or(operation_id{});
  }
  /// Sends and seals a source while decode-0 waits in line for blocks of its own.
  operation_id send_while_decode_waits(kvcache::allocation& blocks, std::uint64_t seed) {
    EXPECT_EQ(ask(*first, "hoard"), "ok");
    EXPECT_EQ(ask(*first, "ask r 50"), "ok");
    const auto id = send_for_decode("r", blocks);
    complete(id, blocks, seed);
    return id;
  }
  void expect_served(forked& decode, operation_id id, const kvcache::allocation& blocks,
                     std::uint64_t seed) {
    expect_given(decode, id, blocks, seed);
    EXPECT_TRUE(whole(*node));
  }
  void expect_held_for(operation_id id, std::chrono::milliseconds time) {
    events->listen_for(time);
    ASSERT_EQ(events->of(id).failed, 0) << to_string(events->of(id).why);
    ASSERT_EQ(node->report().pool.blocks_quarantined, 0u);
  }
};

// -- no peer comes

TEST_P(leases, end_for_a_sealed_cache_that_nobody_reads_and_who_comes_late_is_told) {
  start_decode();
  kvcache::allocation blocks;
  const auto id = send("r", 50, blocks);
  expect_held_for(id, 2 * lease);
  const auto sealed = std::chrono::steady_clock::now();
  complete(id, blocks, 1);
  ASSERT_TRUE(events->unpinned(id));
  EXPECT_GE(std::chrono::steady_clock::now() - sealed, lease);
  EXPECT_EQ(events->of(id).failed, 1);
  EXPECT_EQ(events->of(id).why.code, errc::lease_expired) << to_string(events->of(id).why);
  EXPECT_THAT(events->of(id).why.message, HasSubstr("request `r`"));
  EXPECT_THAT(events->of(id).why.message, HasSubstr("limits.source_lease"));
  give_back(blocks);
  ASSERT_EQ(ask(*first, "ask r 50"), "ok");
  EXPECT_THAT(ask(*first, "outcome 1"), StartsWith("lease_expired"));
  const auto next = send_for_decode("r2", blocks);
  complete(next, blocks, 2);
  ASSERT_EQ(ask(*first, "ask r2 50"), "ok");
  expect_served(*first, next, blocks, 2);
}

// -- a peer is alive and waits

TEST_P(leases, last_while_a_decode_that_lives_waits_in_line) {
  start_decode();
  kvcache::allocation blocks;
  const auto id = send_while_decode_waits(blocks, 2);
  expect_held_for(id, 3 * lease + 500ms);
  ASSERT_EQ(ask(*first, "release"), "ok");
  expect_served(*first, id, blocks, 2);
}

TEST_P(leases, last_while_a_decode_has_asked_and_the_prefill_computes) {
  start_decode();
  ASSERT_EQ(ask(*first, "ask r 50"), "ok");
  kvcache::allocation blocks;
  const auto id = send_for_decode("r", blocks);
  ASSERT_TRUE(events->moving());
  expect_held_for(id, 3 * lease + 500ms);
  complete(id, blocks, 3);
  expect_served(*first, id, blocks, 3);
}

TEST_P(leases, last_while_the_supervisor_stands_still) {
  start_decode();
  kvcache::allocation blocks;
  const auto id = send_while_decode_waits(blocks, 4);
  c.supervisor().stop();
  expect_held_for(id, 4 * lease);
  ASSERT_EQ(ask(*first, "release"), "ok");
  expect_served(*first, id, blocks, 4);
  c.supervisor().signal(SIGCONT);
}

TEST_P(leases, last_when_the_supervisor_is_gone) {
  start_decode();
  kvcache::allocation blocks;
  const auto id = send_while_decode_waits(blocks, 5);
  c.supervisor().end(SIGKILL);
  expect_held_for(id, 4 * lease);
  ASSERT_EQ(ask(*first, "release"), "ok");
  expect_served(*first, id, blocks, 5);
}

TEST_P(leases, last_while_the_prefill_process_itself_stands_still) {
  // While this process is frozen, the clock runs and no heartbeats are counted: a live peer must
  // lose nothing.
  first = later(c, "prefill-0", [](engine& e, line_channel& channel) {
    cache_bytes bytes{e};
    listener told{e};
    channel.say("up");
    if (!channel.order()) return 0;
    auto blocks = e.allocate_blocks(4);
    send_spec spec{"r", blocks->blocks, 0, 0ms, 0, {"decode-0"}};
    auto sent = e.send(std::move(spec));
    bytes.fill(blocks->blocks, 0, 4, 0, 50, 6);
    if (!sent || !e.layers_ready(*sent, 0, 4, 50) || !e.seal(*sent, 50)) return 1;
    channel.say("sealed");
    (void)told.unpinned(*sent);
    channel.say(told.of(*sent).failed > 0 ? to_string(told.of(*sent).why) : "done");
    (void)channel.order();
    return 0;
  });
  survive_as("decode-0");
  begin(*first);
  events->listen_for(300ms * slowness);
  ASSERT_EQ(ask(*first, "send"), "sealed");
  first->stop();
  // Too short to be taken for dead.
  events->listen_for(1500ms);
  first->signal(SIGCONT);
  events->listen_for(300ms);
  const auto id = receive("r", 50);
  ASSERT_TRUE(events->outcome(id));
  EXPECT_EQ(events->of(id).done, 1) << to_string(events->of(id).why);
  EXPECT_EQ(first->channel().hear().value_or("silence"), "done");
}

TEST_P(leases, on_a_destination_last_while_the_decode_waits_in_line) {
  start_prefill();
  ASSERT_EQ(ask(*first, "send r 50 9"), "ok");
  ASSERT_EQ(ask(*first, "ready 4"), "ok");
  auto hoard = node->allocate_blocks(static_cast<std::uint32_t>(node->report().pool.blocks_free));
  ASSERT_TRUE(hoard);
  const auto id = receive("r", 50);
  events->listen_for(3 * lease + 500ms);
  ASSERT_EQ(events->of(id).failed, 0) << to_string(events->of(id).why);
  ASSERT_TRUE(node->free_blocks(hoard->owner, hoard->blocks));
  ASSERT_TRUE(events->moving());
  ASSERT_EQ(ask(*first, "seal"), "ok");
  ASSERT_TRUE(events->unpinned(id));
  EXPECT_EQ(events->of(id).done, 1) << to_string(events->of(id).why);
}

// -- a peer dies

/// Longer than any test: only the death ends the hold.
class long_leases : public leases {
 protected:
  long_leases() : leases{"10min"} {}
};

TEST_P(long_leases, end_with_a_decode_that_dies_before_it_asks) {
  start_decode();
  kvcache::allocation blocks;
  const auto id = send_while_decode_waits(blocks, 7);
  events->listen_for(500ms);
  first->end(SIGKILL);
  expect_lost(id);
  EXPECT_THAT(events->of(id).why.message, HasSubstr("decode-0"));
  give_back(blocks);
  begin(*second);
  const auto next = send_for_decode("r2", blocks);
  complete(next, blocks, 8);
  ASSERT_EQ(ask(*second, "ask r2 50"), "ok");
  expect_served(*second, next, blocks, 8);
}

TEST_P(long_leases, on_a_destination_end_with_a_prefill_that_dies_while_the_decode_waits_in_line) {
  start_prefill();
  auto hoard = node->allocate_blocks(static_cast<std::uint32_t>(node->report().pool.blocks_free));
  ASSERT_TRUE(hoard);
  events->listen_for(300ms * slowness);
  const auto id = receive("r", 50);
  events->listen_for(300ms * slowness);
  ASSERT_EQ(events->of(id).failed, 0) << to_string(events->of(id).why);
  first->end(SIGKILL);
  expect_lost(id);
  EXPECT_THAT(events->of(id).why.message, HasSubstr("prefill-0"));
  give_back(*hoard);
  begin(*second);
  take_from(*second, "r2", 9);
}

// -- a peer dies, and another may come

/// With a window in which a next life always comes.
class leases_with_long_window : public leases {
 protected:
  leases_with_long_window() : leases{"1s", "10min"} {}
};

TEST_P(leases_with_long_window,
       leave_the_source_to_the_next_life_of_one_that_died_before_it_asked) {
  start_decode();
  kvcache::allocation blocks;
  const auto id = send_while_decode_waits(blocks, 10);
  events->listen_for(500ms);
  first->end(SIGKILL);
  begin(*second);
  ASSERT_EQ(events->of(id).failed, 0) << to_string(events->of(id).why);
  ASSERT_EQ(ask(*second, "ask r 50"), "ok");
  expect_served(*second, id, blocks, 10);
}

class leases_with_window : public leases {
 protected:
  leases_with_window() : leases{"1s", std::to_string(window.count()) + "ms"} {}
  static constexpr std::chrono::milliseconds window = sanitized ? 8s : 4s;
};

TEST_P(leases_with_window, end_after_it_when_nobody_comes) {
  start_decode();
  kvcache::allocation blocks;
  const auto id = send_while_decode_waits(blocks, 11);
  events->listen_for(500ms);
  const auto killed = std::chrono::steady_clock::now();
  first->end(SIGKILL);
  // Longer than a lease, since the deployment's window decides here.
  expect_held_for(id, lease + 500ms);
  ASSERT_TRUE(events->unpinned(id));
  EXPECT_GE(std::chrono::steady_clock::now() - killed, window);
  EXPECT_EQ(events->of(id).why.code, errc::peer_lost) << to_string(events->of(id).why);
  EXPECT_THAT(events->of(id).why.message, HasSubstr("decode-0"));
}

TEST_P(leases, refuse_to_be_held_for_a_node_that_does_not_exist) {
  survive_as("prefill-0");
  auto blocks = node->allocate_blocks(1);
  ASSERT_TRUE(blocks);
  auto sent = node->send({"r", blocks->blocks, 0, 0ms, 0, {"decode-9"}});
  ASSERT_FALSE(sent);
  EXPECT_EQ(sent.error().code, errc::not_found);
  EXPECT_THAT(sent.error().message, HasSubstr("decode-9"));
}

const auto ways = ::testing::Values(way{"tcp", "write"}, way{"shm", "read"});
INSTANTIATE_TEST_SUITE_P(every_way, leases, ways, name_of);
INSTANTIATE_TEST_SUITE_P(every_way, long_leases, ways, name_of);
const auto over_tcp = ::testing::Values(way{"tcp", "write"});
INSTANTIATE_TEST_SUITE_P(tcp, leases_with_long_window, over_tcp, name_of);
INSTANTIATE_TEST_SUITE_P(tcp, leases_with_window, over_tcp, name_of);

}  // namespace
}  // namespace troupe::testing
