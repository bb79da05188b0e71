// A prefill process is killed in every state of a transfer: what the decode node sees, and what
// happens to its blocks.

#include <algorithm>

#include "fault_fixture.hpp"
#include "gpu_ways.hpp"

namespace troupe::testing {
namespace {

class killed_prefill : public fault {};

TEST_P(killed_prefill, while_idle_is_replaced_under_its_name) {
  start_prefill();
  take_from(*first, "a", 1);
  first->end(SIGKILL);
  begin(*second);
  take_from(*second, "b", 2);
  // The former link ends by itself, which may take longer than the transfer.
  EXPECT_TRUE(events->until([&] {
    const auto links = node->report().links;
    return std::ranges::count_if(links,
                                 [](const auto& link) { return link.peer == "prefill-0"; }) == 1;
  })) << "the link with the former life is still there";
  EXPECT_TRUE(whole(*node));
}

TEST_P(killed_prefill, before_the_request_met_its_source_ends_the_receive) {
  start_prefill();
  const auto id = receive("early", 50);
  // A process killed before the link is up is never reached, which has another reason.
  ASSERT_TRUE(events->until([&] {
    const auto links = node->report().links;
    return !links.empty() && links.front().state == "up";
  }));
  events->listen_for(300ms);
  ASSERT_EQ(events->of(id).failed, 0) << to_string(events->of(id).why);
  const auto blocks = events->of(id).allocated;
  ASSERT_TRUE(blocks);
  kill_under_way(id, *blocks);
  take_from(*second, "early", 2);
}

TEST_P(killed_prefill, between_layers_ends_the_receive) {
  start_prefill();
  const auto id = receive_two_layers(7);
  if (GetParam().mode == "read") events->listen_for(200ms);
  const auto blocks = events->of(id).allocated;
  ASSERT_TRUE(blocks);
  kill_under_way(id, *blocks);
  take_from(*second, "r", 8);
}

TEST_P(killed_prefill, while_draining_leaves_one_outcome_that_is_true) {
  start_prefill();
  take_from(*first, "first", 1);  // so that the link is up
  constexpr std::uint32_t tokens = 12'000;
  ASSERT_EQ(ask(*first, "send big " + std::to_string(tokens) + " 7"), "ok");
  ASSERT_EQ(ask(*first, "ready 4"), "ok");
  ASSERT_EQ(ask(*first, "seal"), "ok");
  const auto id = receive("big", tokens);
  ASSERT_TRUE(events->until([&] { return events->of(id).allocated.has_value(); }));
  events->listen_for(1ms);
  first->end(SIGKILL);
  ASSERT_TRUE(events->outcome(id));
  ASSERT_TRUE(events->unpinned(id));
  events->listen_for(100ms);
  const auto& t = events->of(id);
  EXPECT_EQ(t.done + t.failed, 1);
  if (t.done == 1) {
    EXPECT_EQ(cache->differing(t.allocated->blocks, 0, tokens, 7), 0u);
  } else {
    EXPECT_EQ(t.why.code, errc::peer_lost) << to_string(t.why);
    EXPECT_FALSE(was_silent(t.why)) << to_string(t.why);
  }
  give_back(*t.allocated);
  begin(*second);
  take_from(*second, "big", 8);
}

TEST_P(killed_prefill, after_done_changes_nothing) {
  start_prefill();
  ASSERT_EQ(ask(*first, "send r 50 7"), "ok");
  ASSERT_EQ(ask(*first, "ready 4"), "ok");
  ASSERT_EQ(ask(*first, "seal"), "ok");
  const auto id = receive("r", 50);
  ASSERT_TRUE(events->outcome(id));
  first->end(SIGKILL);
  events->listen_for(500ms);
  const auto& t = events->of(id);
  EXPECT_EQ(t.done, 1) << to_string(t.why);
  EXPECT_EQ(t.failed, 0);
  EXPECT_EQ(t.unpinned, 1);
  EXPECT_EQ(cache->differing(t.allocated->blocks, 0, 50, 7), 0u);
  give_back(*t.allocated);
  begin(*second);
  take_from(*second, "r", 8);
}

INSTANTIATE_TEST_SUITE_P(every_way, killed_prefill, ::testing::ValuesIn(every_way()), name_of);
INSTANTIATE_TEST_SUITE_P(over_gpus, killed_prefill, ::testing::ValuesIn(gpu_ways()), name_of);

}  // namespace
}  // namespace troupe::testing
