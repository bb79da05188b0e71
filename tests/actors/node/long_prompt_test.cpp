// Prompts of a hundred thousand tokens and more, in scattered blocks, with engine memory for every
// layer: the request's description of its blocks must fit, and every byte must arrive.

#include <algorithm>
#include <string>
#include <vector>

#include "own_cache.hpp"
#include "sanitized.hpp"
#include "ways.hpp"

namespace troupe::testing {
namespace {

int offer(const cluster& c, const prompt& what, line_channel& channel) {
  const own_cache own{c, "prefill-0", what};
  if (own.node() == nullptr) return 1;
  auto& node = *own.node();
  const auto blocks = what.shuffled(1);
  cache_bytes{node}.fill(blocks, 0, what.layers, 0, what.tokens, 7);
  listener events{node};
  const auto send = node.send({"long", blocks});
  if (!send || !node.seal(*send, what.tokens)) return 2;
  channel.say("sealed");
  if (!events.unpinned(*send)) return 3;
  const auto& t = events.of(*send);
  channel.say(t.failed > 0 ? to_string(t.why) : "done");
  (void)channel.order();
  return 0;
}

struct long_move {
  way how;
  prompt what;
};

class long_prompt : public ::testing::TestWithParam<long_move> {};

TEST_P(long_prompt, moves_whole_over_shuffled_blocks) {
  auto [how, what] = GetParam();
  if (const auto why = why_engine_memory_does_not_move(how.backend)) GTEST_SKIP() << *why;
  // An eighth of the prompt where each block costs much more; TROUPE_PROMPT_SHARE=1 runs all of it.
  const auto share =
      number_from_environment("TROUPE_PROMPT_SHARE", sanitized || have_verbs() ? 8 : 1);
  what.tokens /= static_cast<std::uint32_t>(share);
  what.prefix /= static_cast<std::uint32_t>(share);
  auto options = unhurried(options_of(how));
  options.model = what.model();
  cluster c{options};
  forked prefill{[&](line_channel& channel) { return offer(c, what, channel); }};
  const own_cache own{c, "decode-0", what};
  ASSERT_NE(own.node(), nullptr);
  ASSERT_EQ(prefill.channel().hear(), "sealed");
  cache_bytes cache{*own.node()};
  cache.poison();
  const auto blocks = what.shuffled(2);
  listener events{*own.node()};
  const auto receive =
      own.node()->receive({"long", {"prefill-0"}, mode_of(how), what.tokens, what.prefix, blocks});
  ASSERT_TRUE(receive) << to_string(receive.error());
  ASSERT_TRUE(events.unpinned(*receive));
  ASSERT_EQ(events.of(*receive).done, 1) << to_string(events.of(*receive).why);
  EXPECT_EQ(cache.differing(blocks, what.prefix, what.tokens, 7), 0U);
  EXPECT_EQ(prefill.channel().hear(), "done");

  // Nothing outside the request was touched.
  std::vector<bool> used(what.blocks() + spare_blocks, false);
  for (std::size_t i = what.prefix / block_tokens; i < blocks.size(); ++i)
    used[blocks[i].value] = true;
  const auto& layout = own.node()->layout();
  std::size_t touched = 0;
  for (const auto& layer : layout.layers) {
    for (const auto& plane : layer.planes) {
      const auto region = *own.node()->region(plane.region);
      for (std::size_t b = 0; b < used.size(); ++b) {
        if (used[b]) continue;
        const auto bytes = region.subspan(plane.base + b * plane.block_stride, block_tokens);
        touched += std::ranges::count_if(bytes, [](std::byte at) { return at != std::byte{0xEE}; });
      }
    }
  }
  EXPECT_EQ(touched, 0U);
}

std::vector<long_move> long_moves() {
  std::vector<long_move> all;
  for (const auto& how : every_way()) {
    all.push_back({how, {"of_131072_tokens_and_80_layers", 80, 131'072, 0}});
    all.push_back({how, {"of_a_million_tokens", 2, 1'000'000, 0}});
    all.push_back({how, {"behind_a_prefix", 4, 40'000, 20'003}});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(over, long_prompt, ::testing::ValuesIn(long_moves()),
                         [](const ::testing::TestParamInfo<long_move>& of) {
                           return of.param.how.backend + "_" + of.param.how.mode + "_" +
                                  of.param.what.name;
                         });

}  // namespace
}  // namespace troupe::testing
