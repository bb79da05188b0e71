// The transport breaks under live transfers while both processes live: the link is rebuilt and the
// transfers end as if nothing had happened.

#include <random>

#include "rebuild_fixture.hpp"
#include "seed.hpp"

namespace troupe::testing {
namespace {

class rebuilt : public breakable {};

TEST_P(rebuilt, between_layers_the_decode_side_gets_the_rest_over_the_next_link) {
  start_prefill();
  const auto id = receive_two_layers(7);
  cut();
  expect_rest_taken(id, 7);
  expect_rebuilt(1);
  take_from(*first, "next", 8);
}

TEST_P(rebuilt, between_layers_the_prefill_side_sends_the_rest_over_the_next_link) {
  start_decode();
  kvcache::allocation blocks;
  const auto id = send_two_layers(blocks, 3);
  cut();
  ASSERT_TRUE(node->layers_ready(id, 2, 4, 50));
  ASSERT_TRUE(node->seal(id, 50));
  expect_given(*first, id, blocks, 3);
  EXPECT_TRUE(whole(*node));
  expect_rebuilt(1);
  give_to(*first, "next", 4);
}

TEST_P(rebuilt, a_request_that_waits_for_its_source_is_asked_again) {
  start_decode();
  ASSERT_EQ(ask(*first, "receive r 50"), "ok");
  events->listen_for(100ms);
  cut();
  ASSERT_TRUE(events->until([&] { return link().rebuilds >= 1; }));
  kvcache::allocation blocks;
  const auto id = send("r", 50, blocks);
  complete(id, blocks, 5);
  expect_given(*first, id, blocks, 5);
  EXPECT_TRUE(whole(*node));
}

TEST_P(rebuilt, while_nothing_moves_is_not_noticed_by_what_comes_then) {
  start_prefill();
  take_from(*first, "a", 1);
  cut();
  take_from(*first, "b", 2);
  EXPECT_TRUE(whole(*node));
}

TEST_P(rebuilt, three_times_under_many_transfers_at_any_moment_loses_nothing) {
  std::mt19937_64 dice{troupe::testing::printed_seed()};
  const auto spared = start_load();
  for (std::uint32_t times = 1; times <= 3; ++times) {
    events->listen_for(std::chrono::milliseconds{dice() % 60});
    const auto before = link().rebuilds;
    ASSERT_TRUE(events->until([&] { return cut_connections(spared) > 0; }));
    ASSERT_TRUE(events->until([&] { return link().rebuilds > before && link().state == "up"; }))
        << link().state << ": " << link().last_break;
  }
  expect_loaded();
}

/// A store that answers with its port until it is told to end.
int tells_its_port(engine& node, line_channel& channel) {
  channel.say("up");
  while (channel.order()) channel.say(std::to_string(node.report().node.port));
  return 0;
}

TEST_P(rebuilt, under_keyed_values_each_operation_is_done_once) {
  first = later(c, "store-0", tells_its_port);
  survive_as("prefill-0");
  begin(*first);
  const auto spared = cluster_ports();
  std::mt19937_64 dice{troupe::testing::printed_seed()};
  // Small values travel in a frame, large ones are read.
  constexpr std::size_t sizes[]{100, 400'000, 3'000, 70'000};
  constexpr std::size_t count = 12;
  std::vector<std::vector<std::byte>> values;
  for (std::size_t i = 0; i < count; ++i) {
    auto& value = values.emplace_back(sizes[i % 4]);
    for (auto& byte : value) byte = static_cast<std::byte>(dice());
  }
  const auto key = [](std::size_t i) { return "key " + std::to_string(i); };
  const auto warm = node->put("store-0", "first", values[0]);
  ASSERT_TRUE(warm && events->outcome(*warm));
  // A put that is done twice would find its own value, and a removal no value.
  const auto all_of = [&](auto&& start) {
    std::vector<operation_id> started;
    for (std::size_t i = 0; i < count; ++i) {
      auto one = start(i);
      EXPECT_TRUE(one) << to_string(one.error());
      if (one) started.push_back(*one);
    }
    events->listen_for(std::chrono::milliseconds{dice() % 4});
    const auto before = link().rebuilds;
    // A slow wire may break by itself, and a link that is being rebuilt has nothing to break.
    EXPECT_TRUE(events->until([&] { return cut_connections(spared) > 0; }));
    EXPECT_TRUE(events->until([&] { return link().rebuilds > before && link().state == "up"; }))
        << link().state << ": " << link().last_break;
    for (const auto id : started) {
      EXPECT_TRUE(events->outcome(id));
      EXPECT_EQ(events->of(id).done, 1) << to_string(events->of(id).why);
    }
    EXPECT_EQ(started.size(), count);
    return started;
  };
  all_of([&](std::size_t i) { return node->put("store-0", key(i), values[i]); });
  const auto got = all_of([&](std::size_t i) { return node->get("store-0", key(i)); });
  for (std::size_t i = 0; i < got.size(); ++i) {
    const auto& bytes = events->of(got[i]).value.bytes;
    ASSERT_EQ(bytes.size(), values[i].size());
    const auto wrong = std::ranges::mismatch(bytes, values[i]).in1 - bytes.begin();
    EXPECT_EQ(wrong, std::ssize(bytes)) << i << " is wrong from there";
    events->forget(got[i]);
  }
  all_of([&](std::size_t i) { return node->remove("store-0", key(i)); });
}

INSTANTIATE_TEST_SUITE_P(every_way, rebuilt, ::testing::ValuesIn(every_way()), name_of);

}  // namespace
}  // namespace troupe::testing
