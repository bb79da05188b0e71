// More transfers at once than a link has room for grants: a cache with a region for each of its
// 2,048 layers needs as many grants per transfer. Transfers wait for each other, and all of them
// end as done.

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "own_cache.hpp"
#include "ways.hpp"

namespace troupe::testing {
namespace {

/// A prompt of one block.
const prompt short_one{"of_one_block", kvcache::max_layers, block_tokens, 0};

/// Enough requests for their grants to exceed the link's 8,192 or 65,536 slots.
int requests(const way& how) {
  return how.backend == "shm" ? 6 : 40;
}

std::string request(int number) {
  return std::string{"r"}.append(std::to_string(number));
}

/// Offers every request from the same block, and seals them on an order of the test.
int offer_all(const cluster& c, const way& how, line_channel& channel) {
  const own_cache own{c, "prefill-0", short_one};
  if (own.node() == nullptr) return 1;
  auto& node = *own.node();
  const std::vector<block_id> block{{2}};
  cache_bytes{node}.fill(block, 0, short_one.layers, 0, block_tokens, 7);
  listener events{node};
  std::vector<operation_id> sends;
  for (int i = 0; i < requests(how); ++i) {
    auto send = node.send({request(i), block});
    if (!send) return 2;
    sends.push_back(*send);
  }
  channel.say("offered");
  if (!channel.order()) return 0;
  for (const auto send : sends) {
    if (!node.seal(send, block_tokens)) return 3;
  }
  std::string said = "done";
  for (const auto send : sends) {
    if (!events.unpinned(send)) said = "no end";
    if (events.of(send).failed > 0) said = to_string(events.of(send).why);
  }
  channel.say(said);
  (void)channel.order();
  return 0;
}

/// A prefill node that has offered every request, and a decode node with a block for each.
class full_link : public ::testing::TestWithParam<way> {
 protected:
  const way how = GetParam();
  std::unique_ptr<cluster> c;
  std::unique_ptr<forked> prefill;
  std::unique_ptr<own_cache> own;
  std::unique_ptr<listener> events;
  std::vector<operation_id> receives;

  void SetUp() override {
    if (const auto why = why_engine_memory_does_not_move(how.backend)) GTEST_SKIP() << *why;
    auto options = unhurried(options_of(how));
    options.model = short_one.model();
    c = std::make_unique<cluster>(options);
    prefill = std::make_unique<forked>(
        [this](line_channel& channel) { return offer_all(*c, how, channel); });
    auto wide = short_one;
    wide.tokens = static_cast<std::uint32_t>(requests(how)) * block_tokens;
    own = std::make_unique<own_cache>(*c, "decode-0", wide);
    ASSERT_NE(own->node(), nullptr);
    ASSERT_EQ(prefill->channel().hear(), "offered");
    events = std::make_unique<listener>(*own->node());
  }
  void receive_all(std::chrono::milliseconds deadline_of_last = 0ms) {
    for (int i = 0; i < requests(how); ++i) {
      const std::vector block{block_id{static_cast<std::uint32_t>(i)}};
      const auto deadline = i + 1 == requests(how) ? deadline_of_last : 0ms;
      const auto asked = own->node()->receive(
          {request(i), {"prefill-0"}, mode_of(how), block_tokens, 0, block, 0, deadline});
      ASSERT_TRUE(asked) << to_string(asked.error());
      receives.push_back(*asked);
    }
  }
};

TEST_P(full_link, serves_those_that_wait_for_room_when_others_have_ended) {
  receive_all();
  ASSERT_EQ(receives.size(), static_cast<std::size_t>(requests(how)));
  ASSERT_TRUE(events->moving(receives.size()));
  prefill->channel().say("seal");
  cache_bytes cache{*own->node()};
  for (std::size_t i = 0; i < receives.size(); ++i) {
    ASSERT_TRUE(events->unpinned(receives[i])) << i;
    EXPECT_EQ(events->of(receives[i]).done, 1) << to_string(events->of(receives[i]).why);
    EXPECT_EQ(cache.differing({block_id{static_cast<std::uint32_t>(i)}}, 0, block_tokens, 7), 0U);
  }
  EXPECT_EQ(prefill->channel().hear(), "done");
}

/// In read mode the side that offers would wait instead.
class crowded_link : public full_link {};

TEST_P(crowded_link, lets_who_waits_go_at_its_deadline) {
  receive_all(300ms);
  ASSERT_EQ(receives.size(), static_cast<std::size_t>(requests(how)));
  ASSERT_TRUE(events->unpinned(receives.back()));
  EXPECT_EQ(events->of(receives.back()).why.code, errc::deadline)
      << to_string(events->of(receives.back()).why);
  ASSERT_TRUE(own->node()->abort(receives.front(), "seen"));
  ASSERT_TRUE(events->unpinned(receives.front()));
}

/// Without rdma: binding windows on an emulated device is so slow that the tests would do nothing
/// else.
std::vector<way> ways_of(const std::vector<std::string>& modes) {
  std::vector<way> all;
  for (const auto& how : every_way()) {
    if (how.backend != "rdma" && std::ranges::count(modes, how.mode) != 0) all.push_back(how);
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(over, full_link, ::testing::ValuesIn(ways_of({"write", "read"})), name_of);
INSTANTIATE_TEST_SUITE_P(over, crowded_link, ::testing::ValuesIn(ways_of({"write"})), name_of);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(full_link);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(crowded_link);

}  // namespace
}  // namespace troupe::testing
