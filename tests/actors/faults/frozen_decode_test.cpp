// A decode process is frozen while it reads: its source's blocks are not given to another request
// before the decode has said that it reads no more.

#include "fault_fixture.hpp"

namespace troupe::testing {
namespace {

class frozen_decode : public fault {
 protected:
  using fault::fault;
  static constexpr std::uint32_t tokens = 12'000;
};

TEST_P(frozen_decode, keeps_the_source_in_quarantine_while_it_may_read_it) {
  // Over shared memory only the reader knows whether it is inside a copy; a few rounds freeze it
  // there.
  int waited = 0;
  start_decode();
  give_to(*first, "first", 1);  // so that the link is up
  for (int round = 0; round < 50 && waited == 0; ++round) {
    SCOPED_TRACE(round);
    const auto request = "big" + std::to_string(round);
    auto blocks = node->allocate_blocks(tokens / 16);
    ASSERT_TRUE(blocks);
    const auto id = node->send({request, blocks->blocks, 0, 400ms * slowness, 0});
    ASSERT_TRUE(id);
    ASSERT_TRUE(node->layers_ready(*id, 0, 4, tokens));
    ASSERT_TRUE(node->seal(*id, tokens));
    first->channel().say("receive " + request + " " + std::to_string(tokens));
    // Later rounds wait longer, in case the machine is slower than expected.
    std::this_thread::sleep_for(std::chrono::microseconds{200 * (1 + round * 7 % 20)} * slowness *
                                (1 + round / 10));
    first->stop();
    ASSERT_TRUE(events->outcome(*id));
    ASSERT_TRUE(node->free_blocks(blocks->owner, blocks->blocks));
    if (events->of(*id).failed > 0) {
      EXPECT_EQ(events->of(*id).why.code, errc::deadline) << to_string(events->of(*id).why);
    }
    if (events->of(*id).failed > 0 && !events->unpinned(*id, 800ms)) {
      ++waited;
      EXPECT_EQ(node->report().pool.blocks_quarantined, blocks->blocks.size());
    }
    first->signal(SIGCONT);
    ASSERT_TRUE(events->unpinned(*id)) << "the blocks are lost";
    EXPECT_EQ(events->of(*id).done + events->of(*id).failed, 1);
    EXPECT_EQ(events->of(*id).unpinned, 1);
    EXPECT_TRUE(whole(*node));
    ASSERT_EQ(first->channel().hear().value_or("silence"), "ok");
    (void)ask(*first, "outcome 0");
  }
  // Nothing else shows that it was frozen inside a copy, without which the test would prove
  // nothing.
  EXPECT_GT(waited, 0) << "never stopped it inside a copy, or its source was given away";
  give_to(*first, "after", 2);
}

INSTANTIATE_TEST_SUITE_P(mapped_memory, frozen_decode, ::testing::Values(way{"shm", "read"}),
                         name_of);

}  // namespace
}  // namespace troupe::testing
