// A prefill process is frozen and continues later: a short pause loses nothing; after a long one it
// is a lost peer that comes back, and none of its pending writes ever lands.

#include "fault_fixture.hpp"

namespace troupe::testing {
namespace {

class frozen_prefill : public fault {
 protected:
  using fault::fault;
  /// Of a request whose prefill is frozen in the middle.
  static inline const std::chrono::milliseconds deadline = 400ms * slowness;
  static constexpr std::uint32_t tokens = 12'000;
  static constexpr std::uint64_t seed = 7;

  /// Receives `request`, and freezes the prefill process in the middle: once the first bytes of a
  /// write have landed, or before a read has begun.
  operation_id stop_in_the_middle_of(const std::string& request) {
    const bool writes = GetParam().mode == "write";
    EXPECT_EQ(ask(*first, "send " + request + " " + std::to_string(tokens) + " 7"), "ok");
    EXPECT_EQ(ask(*first, "compute 4"), "ok");
    if (!writes) {
      EXPECT_EQ(ask(*first, "tell 4"), "ok");
      EXPECT_EQ(ask(*first, "seal"), "ok");
    }
    const auto id = receive(request, tokens, deadline);
    EXPECT_TRUE(events->until([&] { return events->of(id).allocated.has_value(); }));
    if (writes) {
      const auto blocks = events->of(id).allocated->blocks;
      events->listen_for(50ms);  // until the request is there
      first->channel().say("tell 4");
      first->channel().say("seal");
      // A freeze after this time would be too late.
      const auto late = std::chrono::steady_clock::now() + deadline / 2;
      while (cache->differing_layers(blocks, 0, 1, 0, 1, seed) != 0 &&
             std::chrono::steady_clock::now() < late) {
      }
    }
    first->stop();
    return id;
  }
  /// Wakes the prefill process, which then reports an outcome other than `not_expected`.
  void wake(const std::string& not_expected = {}) {
    first->signal(SIGCONT);
    if (GetParam().mode == "write") {
      EXPECT_EQ(first->channel().hear().value_or("silence"), "ok");
      EXPECT_EQ(first->channel().hear().value_or("silence"), "ok");
    }
    const auto outcome = ask(*first, "outcome");
    if (!not_expected.empty()) {
      EXPECT_NE(outcome, not_expected);
    }
  }
};

/// For less time than any component takes for a death.
class briefly_frozen_prefill : public frozen_prefill {};

TEST_P(briefly_frozen_prefill, that_stands_still_while_it_is_dialled_is_reached_when_it_goes_on) {
  start_prefill();
  ASSERT_EQ(ask(*first, "send r 50 7"), "ok");
  ASSERT_EQ(ask(*first, "ready 4"), "ok");
  ASSERT_EQ(ask(*first, "seal"), "ok");
  first->stop();
  const auto id = receive("r", 50);
  events->listen_for(700ms);  // several keep-alives
  EXPECT_EQ(events->of(id).failed, 0) << to_string(events->of(id).why);
  first->signal(SIGCONT);
  expect_taken(*first, id, 7);
}

TEST_P(briefly_frozen_prefill, never_lands_a_late_write_in_reused_blocks) {
  // Over shared memory only the writer knows that it writes no more: if it is frozen inside a copy,
  // the blocks wait for it in quarantine. A few rounds freeze it there.
  const bool only_it_can_say = GetParam().backend == "shm" && GetParam().mode == "write";
  int stopped_in_time = 0;
  int waited = 0;
  start_prefill();
  take_from(*first, "first", 1);  // so that the link is up
  for (int round = 0; round < 40 && (only_it_can_say ? waited : stopped_in_time) == 0; ++round) {
    SCOPED_TRACE(round);
    const auto id = stop_in_the_middle_of("big" + std::to_string(round));
    ASSERT_TRUE(events->outcome(id));
    auto& t = events->of(id);
    ASSERT_TRUE(node->free_blocks(t.allocated->owner, t.allocated->blocks));
    if (t.done == 1) {
      wake();
      continue;
    }
    ++stopped_in_time;
    EXPECT_EQ(t.why.code, errc::deadline) << to_string(t.why);
    if (!only_it_can_say) {
      ASSERT_TRUE(events->unpinned(id)) << "a frozen peer keeps blocks that need not wait for it";
    } else if (!events->unpinned(id, 1200ms)) {
      ++waited;
      EXPECT_EQ(node->report().pool.blocks_quarantined, t.allocated->blocks.size());
      first->signal(SIGCONT);
      ASSERT_TRUE(events->unpinned(id)) << "the blocks are lost";
    }
    ASSERT_TRUE(whole(*node));
    auto reused = node->allocate_blocks(static_cast<std::uint32_t>(t.allocated->blocks.size()));
    ASSERT_TRUE(reused);
    cache->fill(reused->blocks, 0, 4, 0, tokens, 555);
    wake("done");
    events->listen_for(200ms);
    EXPECT_EQ(cache->differing(reused->blocks, 0, tokens, 555), 0u)
        << "a late write landed in reused blocks";
    EXPECT_EQ(t.failed, 1);
    EXPECT_EQ(t.unpinned, 1);
    ASSERT_TRUE(node->free_blocks(reused->owner, reused->blocks));
  }
  take_from(*first, "after", 9);
  // On a busy machine no round may catch it; the test is then reported as skipped.
  if ((only_it_can_say ? waited : stopped_in_time) == 0) GTEST_SKIP() << "never stopped it in time";
}

/// For longer than the supervisor waits for heartbeats; no other component takes it for dead.
class long_frozen_prefill : public frozen_prefill {
 protected:
  long_frozen_prefill() : frozen_prefill{watched()} {}
  static cluster_options watched() {
    auto options = patient(GetParam());
    options.heartbeat_timeout = "4s";
    return options;
  }
};

TEST_P(long_frozen_prefill,
       that_stands_still_for_longer_than_the_heartbeat_timeout_is_lost_and_returns) {
  start_prefill();
  take_from(*first, "first", 1);
  ASSERT_EQ(ask(*first, "send r 50 7"), "ok");
  ASSERT_EQ(ask(*first, "ready 2"), "ok");
  const auto id = receive("r", 50);
  ASSERT_TRUE(events->moving());
  first->stop();
  ASSERT_TRUE(events->outcome(id));
  ASSERT_TRUE(events->unpinned(id)) << "the blocks wait for a peer that is not inside";
  auto& t = events->of(id);
  EXPECT_EQ(t.failed, 1);
  EXPECT_EQ(t.why.code, errc::peer_lost) << to_string(t.why);
  EXPECT_FALSE(was_silent(t.why)) << to_string(t.why);
  give_back(*t.allocated);
  first->signal(SIGCONT);
  EXPECT_NE(ask(*first, "outcome"), "done");
  // It registers again, and is a peer like any other.
  ASSERT_EQ(ask(*first, "send again 50 8"), "ok");
  ASSERT_EQ(ask(*first, "ready 4"), "ok");
  ASSERT_EQ(ask(*first, "seal"), "ok");
  troupe::error why;
  EXPECT_TRUE(comes_true([&] {
    const auto next = receive("again", 50);
    EXPECT_TRUE(events->unpinned(next));
    auto& outcome = events->of(next);
    why = outcome.why;
    if (outcome.done == 1) {
      EXPECT_EQ(cache->differing(outcome.allocated->blocks, 0, 50, 8), 0u);
    }
    if (outcome.allocated) {
      EXPECT_TRUE(node->free_blocks(outcome.allocated->owner, outcome.allocated->blocks));
    }
    return outcome.done == 1;
  })) << to_string(why);
  EXPECT_EQ(ask(*first, "outcome"), "done");
}

INSTANTIATE_TEST_SUITE_P(every_way, long_frozen_prefill, ::testing::ValuesIn(every_way()), name_of);
INSTANTIATE_TEST_SUITE_P(every_way, briefly_frozen_prefill, ::testing::ValuesIn(every_way()),
                         name_of);

}  // namespace
}  // namespace troupe::testing
