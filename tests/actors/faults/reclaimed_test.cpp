// A decode process that may read is frozen and taken for dead: its source is reclaimed and the
// blocks are used for another request. When it wakes up and reads, it gets an error, and not one
// byte of the other request.

#include <sstream>

#include "fault_fixture.hpp"

namespace troupe::testing {
namespace {

constexpr std::uint32_t tokens = 4'096;
constexpr std::uint64_t old_seed = 1, new_seed = 2;

/// Requests and polls only on an order: "receive ID" requests it; "outcome" polls until the end,
/// and answers with the outcome and the number of pieces that belong to the new request.
int sleepy_decode(engine& node, line_channel& channel) {
  cache_bytes cache{node};
  listener events{node};
  operation_id receive;
  channel.say("up");
  while (auto line = channel.order()) {
    std::istringstream words{*line};
    std::string verb, request;
    words >> verb >> request;
    if (verb == "receive") {
      cache.poison();
      auto asked = node.receive({request, {"prefill-0"}, actors::transfer_mode::read, tokens});
      if (!asked) return 1;
      receive = *asked;
      if (!events.moving()) return 2;
      events.listen_for(100ms);
      channel.say("ok");
    } else if (verb == "outcome") {
      if (!events.unpinned(receive)) return 3;
      auto& t = events.of(receive);
      const std::size_t pieces = std::size_t{4} * 2 * 2 * tokens;
      const auto of_others = pieces - cache.differing(t.allocated->blocks, 0, tokens, new_seed);
      channel.say((t.failed > 0 ? "failed " : "done ") + std::to_string(of_others));
      (void)node.free_blocks(t.allocated->owner, t.allocated->blocks);
    }
  }
  return 0;
}

class reclaimed : public fault {
 protected:
  /// Every block of the pool, so that the same blocks are used again.
  kvcache::allocation take_all() {
    auto all = node->allocate_blocks(tokens / 16);
    EXPECT_TRUE(all) << to_string(all.error());
    return all.value_or(kvcache::allocation{});
  }
  reclaimed() : fault{one_request_large()} {}
  static cluster_options one_request_large() {
    auto options = patient(GetParam());
    options.heartbeat_timeout = "2s";  // so that it is taken for dead
    options.peer_silence = "1s";
    options.prefill_pool = "4MiB";
    options.decode_pool = "4MiB";
    return options;
  }
};

TEST_P(reclaimed, blocks_are_never_read_by_a_decode_that_was_taken_for_dead) {
  first = later(c, "decode-0", sleepy_decode, progress::polling);
  survive_as("prefill-0");
  begin(*first);
  ASSERT_EQ(node->report().pool.blocks_total, tokens / 16);
  auto blocks = take_all();
  auto sent = node->send({"r", blocks.blocks, 0, 0ms, 0, {"decode-0"}});
  ASSERT_TRUE(sent) << to_string(sent.error());
  ASSERT_EQ(ask(*first, "receive r"), "ok");
  ASSERT_TRUE(events->moving());
  cache->fill(blocks.blocks, 0, 4, 0, tokens, old_seed);
  ASSERT_TRUE(node->layers_ready(*sent, 0, 4, tokens));
  ASSERT_TRUE(node->seal(*sent, tokens));
  events->listen_for(200ms);  // the offer goes out, and is not taken
  ASSERT_EQ(events->of(*sent).done + events->of(*sent).failed, 0);
  ASSERT_TRUE(node->free_blocks(blocks.owner, blocks.blocks));
  first->stop();
  ASSERT_TRUE(events->outcome(*sent)) << "it was not taken for dead";
  EXPECT_EQ(events->of(*sent).why.code, errc::peer_lost) << to_string(events->of(*sent).why);
  const auto use_again = [&] {
    auto again = take_all();
    cache->fill(again.blocks, 0, 4, 0, tokens, new_seed);
  };
  // In mapped memory only the reader knows whether it reads.
  const bool only_it_can_say = GetParam().backend == "shm";
  const bool given_back = only_it_can_say ? events->unpinned(*sent, 3s) : events->unpinned(*sent);
  if (given_back) {
    use_again();
  } else {
    ASSERT_TRUE(only_it_can_say) << "a frozen peer keeps blocks that need not wait for it";
    EXPECT_EQ(node->report().pool.blocks_quarantined, blocks.blocks.size());
  }
  first->signal(SIGCONT);
  EXPECT_EQ(ask(*first, "outcome"), "failed 0");
  ASSERT_TRUE(events->unpinned(*sent)) << "the blocks are lost";
  EXPECT_EQ(events->of(*sent).unpinned, 1);
  if (!given_back) use_again();
}

INSTANTIATE_TEST_SUITE_P(every_way, reclaimed,
                         ::testing::Values(way{"tcp", "read"}, way{"shm", "read"}), name_of);

}  // namespace
}  // namespace troupe::testing
