// A decode process is killed and another one receives from the same source blocks.

#include "fault_fixture.hpp"

namespace troupe::testing {
namespace {

/// In which the next life of a decode process must be up and ask.
const std::chrono::milliseconds window = have_verbs() ? 3s : sanitized ? 4s : 2s;

/// A deployment that keeps a source for another decode node, for a while.
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
  // Longer than the window: it was for the arrival of another decode, not for its transfer.
  events->listen_for(window + 500ms);
  ASSERT_EQ(events->of(id).failed, 0) << to_string(events->of(id).why);
  ASSERT_TRUE(node->layers_ready(id, 2, 4, 50));
  ASSERT_TRUE(node->seal(id, 50));
  EXPECT_EQ(ask(*second, "outcome 3"), "done");
  ASSERT_TRUE(events->unpinned(id));
  EXPECT_EQ(events->of(id).done, 1);
  ASSERT_TRUE(node->free_blocks(blocks.owner, blocks.blocks));
  EXPECT_TRUE(whole(*node));
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
  ASSERT_TRUE(node->free_blocks(blocks.owner, blocks.blocks));
  EXPECT_TRUE(whole(*node));
}

std::vector<way> ways() {
  if (have_verbs()) return {{"rdma", "write"}};
  return {{"tcp", "write"}, {"shm", "read"}};
}

INSTANTIATE_TEST_SUITE_P(every_way, retry, ::testing::ValuesIn(ways()), name_of);

}  // namespace
}  // namespace troupe::testing
