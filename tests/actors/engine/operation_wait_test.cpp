// Waiting for one operation: the waiting thread gets its end, whatever else the node does, and
// nothing of the operation is left after the wait.

#include <atomic>
#include <future>
#include <set>
#include <string>
#include <thread>

#include "ways.hpp"

namespace troupe::testing {
namespace {

constexpr std::uint32_t tokens = 40;
/// Of the cluster's model: layers, K and V, heads, elements, bytes of each.
constexpr std::uint64_t bytes_per_token = 4ULL * 2 * 2 * 32 * 2;

/// Sends every request that the test names, one per line, each on a thread that waits for it.
int sends_and_waits(engine& node, line_channel& channel) {
  const auto blocks = node.allocate_blocks(3);
  if (!blocks) return 1;
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  channel.say("up");
  while (auto line = channel.order()) {
    if (*line == "end") break;
    threads.emplace_back([&, request = *line] {
      const auto send = node.send({.request = request, .blocks = blocks->blocks});
      if (!send || !node.seal(*send, tokens, {std::byte{7}})) {
        ++wrong;
        return;
      }
      wrong += node.wait(*send) ? 0 : 1;
    });
  }
  for (auto& one : threads) one.join();
  channel.say(node.take().empty() ? "nothing left" : "events are left");
  return wrong;
}

class waiting_for_one : public ::testing::TestWithParam<way> {
 protected:
  std::unique_ptr<cluster> c;
  std::unique_ptr<forked> prefill;
  std::unique_ptr<engine> node;

  void SetUp() override {
    c = std::make_unique<cluster>(unhurried(options_of(GetParam())));
    prefill = c->spawn("prefill-0", sends_and_waits);
    cluster::quiet("decode-0");
    node = c->start("decode-0");
    ASSERT_TRUE(node);
    ASSERT_EQ(prefill->channel().hear().value_or("silence"), "up");
  }
  [[nodiscard]] std::uint64_t free_blocks() const { return node->report().pool.blocks_free; }
};

/// Places, receives and ends a request. Returns what went wrong, or an empty string.
std::string one_request(engine& node, const std::string& request) {
  const auto place = node.place({request, "prefill", "decode", 10'000});
  if (!place) return to_string(place.error());
  const auto placed = node.wait(*place);
  if (!placed) return to_string(placed.error());
  const auto receive = node.receive(receive_spec::of(placed->where, tokens));
  if (!receive) return to_string(receive.error());
  const auto done = node.wait(*receive);
  if (!done) return to_string(done.error());
  node.placed_request_ended(request);
  if (done->bytes != tokens * bytes_per_token || done->aux != std::vector{std::byte{7}} ||
      done->blocks.blocks.size() != 3) {
    return "the outcome says too little";
  }
  const auto freed = node.free_blocks(done->blocks.owner, done->blocks.blocks);
  return freed ? "" : to_string(freed.error());
}

TEST_P(waiting_for_one, serves_many_threads_at_once_and_leaves_nothing) {
  constexpr int threads = 5;
  const int rounds = 20 / slowness + 1;
  const auto before = free_blocks();
  std::vector<std::future<std::string>> all;
  for (int i = 0; i < threads; ++i) {
    for (int k = 0; k < rounds; ++k) {
      prefill->channel().say("r" + std::to_string(i) + "-" + std::to_string(k));
    }
  }
  for (int i = 0; i < threads; ++i) {
    all.push_back(std::async(std::launch::async, [&, i] {
      for (int k = 0; k < rounds; ++k) {
        auto wrong = one_request(*node, "r" + std::to_string(i) + "-" + std::to_string(k));
        if (!wrong.empty()) return wrong;
      }
      return std::string{};
    }));
  }
  for (auto& one : all) EXPECT_EQ(one.get(), "");
  EXPECT_TRUE(node->take().empty());
  EXPECT_TRUE(comes_true([&] { return free_blocks() == before; }));
  prefill->channel().say("end");
  EXPECT_EQ(prefill->channel().hear().value_or("silence"), "nothing left");
  EXPECT_EQ(prefill->join(), 0);
}

TEST_P(waiting_for_one, leaves_the_events_of_others_to_the_thread_that_takes_them) {
  const auto mine = node->receive(
      {.request = "mine", .sources = {"prefill-0"}, .mode = mode_of(GetParam()), .tokens = tokens});
  const auto other = node->query("decode-0", "no such key");
  const auto another = node->receive({.request = "another",
                                      .sources = {"prefill-0"},
                                      .mode = mode_of(GetParam()),
                                      .tokens = tokens});
  ASSERT_TRUE(mine && other && another);
  auto waits = std::async(std::launch::async, [&] { return node->wait(*mine); });
  prefill->channel().say("another");
  listener events{*node};
  ASSERT_TRUE(events.unpinned(*another));
  ASSERT_TRUE(events.outcome(*other));
  prefill->channel().say("mine");
  ASSERT_EQ(waits.wait_for(wait_limit), std::future_status::ready);
  const auto done = waits.get();
  ASSERT_TRUE(done) << to_string(done.error());
  EXPECT_EQ(done->bytes, tokens * bytes_per_token);
  EXPECT_EQ(events.of(*another).done, 1);
  EXPECT_EQ(events.of(*mine).done + events.of(*mine).failed, 0);
  for (const auto id : {*mine, *other, *another}) {
    const auto again = node->wait(id);
    ASSERT_FALSE(again);
    EXPECT_EQ(again.error().code, errc::not_found);
  }
}

TEST_P(waiting_for_one, that_is_given_up_takes_nothing_and_may_be_tried_again) {
  const auto before = free_blocks();
  const auto mine = node->receive(
      {.request = "late", .sources = {"prefill-0"}, .mode = mode_of(GetParam()), .tokens = tokens});
  ASSERT_TRUE(mine) << to_string(mine.error());
  EXPECT_FALSE(node->wait(*mine, std::chrono::milliseconds{0}));
  EXPECT_FALSE(node->wait(*mine, std::chrono::milliseconds{30}));
  ASSERT_TRUE(node->abort(*mine, "given up"));
  const auto over = node->wait(*mine, wait_limit);
  ASSERT_TRUE(over) << "still going on";
  ASSERT_FALSE(*over);
  EXPECT_EQ(over->error().code, errc::aborted);
  EXPECT_TRUE(comes_true([&] { return free_blocks() == before; }))
      << "a receive that failed keeps blocks of the pool";
  EXPECT_TRUE(node->take().empty());
}

INSTANTIATE_TEST_SUITE_P(over, waiting_for_one, ::testing::ValuesIn(every_way()), name_of);

class end_of_a_node : public ::testing::TestWithParam<bool> {};

TEST_P(end_of_a_node, wakes_every_thread_that_waits_for_an_operation) {
  const cluster c{unhurried()};
  cluster::quiet("decode-0");
  for (int round = 0; round < 5; ++round) {
    engine_options options;
    options.polling = GetParam();
    const auto node = c.start("decode-0", std::move(options));
    ASSERT_TRUE(node);
    std::vector<std::future<result<outcome>>> waiting;
    for (int i = 0; i < 4; ++i) {
      // Never sent by any node.
      const auto asked = node->receive(
          {.request = "r" + std::to_string(i), .sources = {"prefill-0"}, .tokens = tokens});
      ASSERT_TRUE(asked) << to_string(asked.error());
      waiting.push_back(
          std::async(std::launch::async, [&, id = *asked] { return node->wait(id); }));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds{2 * round});
    node->stop();
    for (auto& one : waiting) {
      ASSERT_EQ(one.wait_for(wait_limit), std::future_status::ready);
      const auto told = one.get();
      ASSERT_FALSE(told);
      EXPECT_EQ(told.error().code, errc::aborted) << told.error().message;
    }
    EXPECT_EQ(node->wait(operation_id{1}).error().code, errc::not_found);
  }
}

INSTANTIATE_TEST_SUITE_P(of, end_of_a_node, ::testing::Bool(), [](const auto& polling) {
  return polling.param ? "polling" : "event_driven";
});

TEST(receive_of_a_placement, has_everything_that_the_placement_says) {
  actors::placement where;
  where.request = "r";
  where.supervisor_incarnation = 77;
  where.epoch = 5;
  where.mode = transfer_mode::read;
  where.prefill.resize(2);
  where.prefill[0].name = "prefill-0-tp0";
  where.prefill[1].name = "prefill-0-tp1";
  const auto spec = receive_spec::of(where, 33, {block_id{4}});
  EXPECT_EQ(spec.request, "r");
  EXPECT_EQ(spec.sources, (std::vector<std::string>{"prefill-0-tp0", "prefill-0-tp1"}));
  EXPECT_EQ(spec.mode, transfer_mode::read);
  EXPECT_EQ(spec.tokens, 33u);
  EXPECT_EQ(spec.blocks, std::vector{block_id{4}});
  EXPECT_EQ(spec.placed_by, 77u);
  EXPECT_EQ(spec.placed_at, 5u);
}

}  // namespace
}  // namespace troupe::testing
