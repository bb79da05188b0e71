// A decode process is killed in every state of a transfer: what the prefill node sees, and what
// happens to its blocks.

#include "fault_fixture.hpp"
#include "gpu_ways.hpp"

namespace troupe::testing {
namespace {

class killed_decode : public fault {};

TEST_P(killed_decode, while_idle_is_replaced_under_its_name) {
  start_decode();
  give_to(*first, "a", 1);
  first->end(SIGKILL);
  begin(*second);
  give_to(*second, "b", 2);
  EXPECT_TRUE(whole(*node));
}

TEST_P(killed_decode, before_its_request_met_a_source_leaves_no_trace) {
  start_decode();
  ASSERT_EQ(ask(*first, "receive r 50"), "ok");
  events->listen_for(300ms);
  first->end(SIGKILL);
  // This source must not serve the dead process's request, but must serve the next one.
  begin(*second);
  give_to(*second, "r", 2);
  EXPECT_TRUE(whole(*node));
}

TEST_P(killed_decode, between_layers_ends_the_send) {
  start_decode();
  kvcache::allocation blocks;
  const auto id = send_two_layers(blocks, 3);
  if (GetParam().mode == "write") {
    ASSERT_EQ(ask(*first, "layers"), "ok");
  } else {
    events->listen_for(200ms);
  }
  kill_under_way(id, blocks);
  give_to(*second, "r2", 4);
}

TEST_P(killed_decode, while_draining_ends_the_send) {
  // The first process polls and then stops polling, so it never takes the seal or the offer.
  start_decode(progress::polling);
  kvcache::allocation blocks;
  const auto id = send("r", 50, blocks);
  ASSERT_EQ(ask(*first, "receive r 50"), "ok");
  complete(id, blocks, 3);
  ASSERT_TRUE(events->moving()) << "nobody asked for it";
  events->listen_for(300ms);
  ASSERT_EQ(events->of(id).done + events->of(id).failed, 0) << to_string(events->of(id).why);
  kill_under_way(id, blocks);
  give_to(*second, "r2", 4);
}

TEST_P(killed_decode, after_done_changes_nothing) {
  start_decode();
  kvcache::allocation blocks;
  const auto id = send("r", 50, blocks);
  complete(id, blocks, 3);
  ASSERT_EQ(ask(*first, "receive r 50"), "ok");
  ASSERT_TRUE(events->outcome(id));
  first->end(SIGKILL);
  events->listen_for(500ms);
  EXPECT_EQ(events->of(id).done, 1) << to_string(events->of(id).why);
  EXPECT_EQ(events->of(id).failed, 0);
  EXPECT_EQ(events->of(id).unpinned, 1);
  give_back(blocks);
  begin(*second);
  give_to(*second, "r2", 4);
}

INSTANTIATE_TEST_SUITE_P(every_way, killed_decode, ::testing::ValuesIn(every_way()), name_of);
INSTANTIATE_TEST_SUITE_P(over_gpus, killed_decode, ::testing::ValuesIn(gpu_ways()), name_of);

}  // namespace
}  // namespace troupe::testing
