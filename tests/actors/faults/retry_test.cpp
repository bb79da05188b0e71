// A decode process is killed and another one receives from the same source blocks.

#include "fault_fixture.hpp"

namespace troupe::testing {
namespace {

/// The next life of a decode process must be up and ask within this time, even in an emulated
/// machine.
const std::chrono::milliseconds window = have_verbs() ? 10s : sanitized ? 4s : 2s;

/// A deployment that keeps a source for another decode node for some time.
class retry : public fault {
 protected:
  retry() : fault{with_window()} {}
  static cluster_options with_window() {
    auto options = patient(GetParam());
    options.retry_window = std::to_string(window.count()) + "ms";
    return options;
  }
};

TEST_P(retry, serves_another_decode_from_the_same_blocks_and_gives_it_the_whole_deadline) {
  start_decode();
  kvcache::allocation blocks;
  const auto id = send_two_layers(blocks, 3);
  events->listen_for(200ms);
  first->end(SIGKILL);
  begin(*second);
  ASSERT_EQ(ask(*second, "receive r 50"), "ok");
  // Longer than the window, which bounds the arrival of another decode, not its transfer.
  events->listen_for(window + 500ms);
  ASSERT_EQ(events->of(id).failed, 0) << to_string(events->of(id).why);
  ASSERT_TRUE(node->layers_ready(id, 2, 4, 50));
  ASSERT_TRUE(node->seal(id, 50));
  EXPECT_EQ(ask(*second, "outcome 3"), "done");
  ASSERT_TRUE(events->unpinned(id));
  EXPECT_EQ(events->of(id).done, 1);
  give_back(blocks);
}

TEST_P(retry, ends_when_no_other_decode_comes_within_the_window) {
  start_decode();
  kvcache::allocation blocks;
  const auto id = send_two_layers(blocks, 3);
  events->listen_for(200ms);
  first->end(SIGKILL);
  events->listen_for(300ms);
  EXPECT_EQ(events->of(id).failed, 0) << "the window is not over";
  ASSERT_TRUE(events->unpinned(id));
  EXPECT_EQ(events->of(id).failed, 1);
  EXPECT_EQ(events->of(id).why.code, errc::peer_lost) << to_string(events->of(id).why);
  give_back(blocks);
}

TEST_P(retry, a_rank_whose_own_deadline_passes_leaves_the_source_to_others) {
  start_decode();
  kvcache::allocation blocks;
  const auto id = send("r", 50, blocks);
  cache->fill(blocks.blocks, 0, 4, 0, 50, 3);
  const auto soon = std::to_string(300 * slowness);
  ASSERT_EQ(ask(*first, "receive r 50 " + soon), "ok");
  ASSERT_TRUE(node->layers_ready(id, 0, 2, 50));
  EXPECT_EQ(ask(*first, "outcome 3").rfind("deadline", 0), 0U);
  ASSERT_EQ(ask(*first, "receive r 50"), "ok");
  ASSERT_TRUE(node->layers_ready(id, 2, 4, 50));
  ASSERT_TRUE(node->seal(id, 50));
  EXPECT_EQ(ask(*first, "outcome 3"), "done");
  ASSERT_TRUE(events->unpinned(id));
  EXPECT_EQ(events->of(id).done, 1) << to_string(events->of(id).why);
  give_back(blocks);
}

TEST_P(retry, a_rank_that_asks_for_more_than_there_is_leaves_the_source_to_others) {
  start_decode();
  kvcache::allocation blocks;
  const auto id = send("r", 50, blocks);
  cache->fill(blocks.blocks, 0, 4, 0, 50, 3);
  ASSERT_EQ(ask(*first, "ask r 80"), "ok");
  const auto refused = ask(*first, "outcome 3");
  EXPECT_EQ(refused.rfind("out_of_range", 0), 0U) << refused;
  EXPECT_NE(refused.find("hold 64"), std::string::npos) << refused;
  // More tokens than the source will have, but no more than its blocks hold.
  ASSERT_EQ(ask(*first, "receive r 60"), "ok");
  ASSERT_TRUE(events->moving());
  ASSERT_TRUE(node->layers_ready(id, 0, 4, 50));
  ASSERT_TRUE(node->seal(id, 50));
  const auto failed = ask(*first, "outcome 3");
  EXPECT_EQ(failed.rfind("out_of_range", 0), 0U) << failed;
  ASSERT_EQ(ask(*first, "ask r 50"), "ok");
  EXPECT_EQ(ask(*first, "outcome 3"), "done");
  ASSERT_TRUE(events->unpinned(id));
  EXPECT_EQ(events->of(id).done, 1) << to_string(events->of(id).why);
  give_back(blocks);
}

std::vector<way> ways() {
  if (have_verbs()) return {{"rdma", "write"}};
  return {{"tcp", "write"}, {"shm", "read"}};
}

INSTANTIATE_TEST_SUITE_P(every_way, retry, ::testing::ValuesIn(ways()), name_of);

}  // namespace
}  // namespace troupe::testing
