// Streams of a decode engine that wait, on the GPU, for layers: what they see when they continue,
// and that they continue whatever becomes of the receive.

#include <array>
#include <atomic>

#include "engine_stream.hpp"
#include "fault_fixture.hpp"
#include "gpu_ways.hpp"

namespace troupe::testing {
namespace {

using transport::xgmi::engine_stream;
using transport::xgmi::gpu_double;
using transport::xgmi::gpu_site;

constexpr std::uint32_t held_tokens = 50;
constexpr std::uint32_t held_layers = 4;
constexpr std::uint64_t seed = 7;

class held_streams : public fault {
 protected:
  held_streams() : fault{on_gpus()} {}
  static cluster_options on_gpus() {
    auto options = patient(GetParam());
    options.prefill_device = "gpu:0";
    options.decode_device = "gpu:1";
    return options;
  }

  gpu_double* gpus{nullptr};
  std::unique_ptr<engine_stream> stream, other;
  kvcache::allocation blocks;
  /// By layer: how many pieces were wrong when the stream reached it.
  std::array<std::atomic<int>, held_layers> wrong;

  void SetUp() override {
    start_prefill();
    gpus = &dynamic_cast<gpu_double&>(*gpu_site::of_process()->runtime);
    stream = std::make_unique<engine_stream>(*gpus, 1);
    other = std::make_unique<engine_stream>(*gpus, 1);
    cache->poison();
    for (auto& layer : wrong) layer = -1;
    auto got = node->allocate_blocks((held_tokens + 15) / 16);
    ASSERT_TRUE(got);
    blocks = *got;
  }
  /// Stopping the node releases any stream that is still held, which would hang the test.
  void TearDown() override {
    if (node) node->stop();
  }
  operation_id take(std::uint32_t prefix = 0, std::chrono::milliseconds deadline = 0ms) {
    auto asked = node->receive(
        {"r", {"prefill-0"}, mode_of(GetParam()), held_tokens, prefix, blocks.blocks, 0, deadline});
    EXPECT_TRUE(asked) << to_string(asked.error());
    return asked.value_or(operation_id{});
  }
  /// The stream waits for a layer and then reads it.
  void read_behind(operation_id id, std::uint32_t layer) {
    const auto held = node->await_layers(id, layer, layer + 1, held_tokens, stream->name());
    ASSERT_TRUE(held) << to_string(held.error());
    stream->work([this, layer] {
      wrong[layer] = static_cast<int>(
          cache->differing_layers(blocks.blocks, layer, layer + 1, 0, held_tokens, seed));
    });
  }
  bool stand(std::uint64_t streams) {
    return events->until([&] { return gpus->standing() == streams; });
  }
  bool has_done(int pieces) {
    return events->until([&] { return stream->done() == pieces; });
  }
  errc refusal(operation_id id, std::uint32_t begin, std::uint32_t end, std::uint32_t until) {
    const auto held = node->await_layers(id, begin, end, until, stream->name());
    return held ? errc::internal : held.error().code;
  }
  /// Makes the stream wait for the whole receive, and checks that it stands.
  void hold(operation_id id) {
    const auto held = node->await_layers(id, 0, held_layers, held_tokens, stream->name());
    EXPECT_TRUE(held) << to_string(held.error());
    stream->work();
    EXPECT_TRUE(stand(1));
    EXPECT_EQ(stream->done(), 0);
  }
  /// Starts a receive that has its link but no data yet, and a stream that waits for it.
  operation_id hold_one() {
    EXPECT_EQ(ask(*first, "send r 50 7"), "ok");
    const auto id = take();
    EXPECT_TRUE(events->moving());
    hold(id);
    return id;
  }
};

TEST_P(held_streams, see_every_byte_of_the_layers_that_they_waited_for) {
  ASSERT_EQ(ask(*first, "send r 50 7"), "ok");
  ASSERT_EQ(ask(*first, "compute 4"), "ok");
  const auto id = take();
  for (std::uint32_t layer = 0; layer < held_layers; ++layer) {
    ASSERT_NO_FATAL_FAILURE(read_behind(id, layer));
  }
  ASSERT_TRUE(stand(1));
  EXPECT_EQ(stream->done(), 0);
  for (std::uint32_t layer = 0; layer < held_layers; ++layer) {
    ASSERT_EQ(ask(*first, "tell " + std::to_string(layer + 1)), "ok");
    if (GetParam().mode != "write") continue;
    const auto come = static_cast<int>(layer) + 1;
    ASSERT_TRUE(has_done(come)) << "layer " << layer << " came and the stream was not let go";
    EXPECT_EQ(stream->done(), come);
  }
  ASSERT_EQ(ask(*first, "seal"), "ok");
  ASSERT_TRUE(has_done(held_layers));
  for (std::uint32_t layer = 0; layer < held_layers; ++layer) {
    EXPECT_EQ(wrong[layer], 0) << "pieces of layer " << layer << " were not there yet";
  }
  ASSERT_TRUE(events->outcome(id));
  EXPECT_EQ(events->of(id).done, 1) << to_string(events->of(id).why);
}

TEST_P(held_streams, wait_each_for_their_own_layers_and_all_of_them) {
  if (GetParam().mode != "write") GTEST_SKIP() << "layers come one by one in write mode";
  ASSERT_EQ(ask(*first, "send r 50 7"), "ok");
  const auto id = take();
  ASSERT_TRUE(node->await_layers(id, 1, 4, held_tokens, stream->name()));
  ASSERT_TRUE(node->await_layers(id, 0, 2, held_tokens, other->name()));
  stream->work();
  other->work();
  ASSERT_TRUE(stand(2));
  ASSERT_EQ(ask(*first, "ready 3"), "ok");
  ASSERT_TRUE(events->until([&] { return other->done() == 1; }));
  ASSERT_TRUE(stand(1));
  EXPECT_EQ(stream->done(), 0);
  // Layers that are already complete hold no stream.
  ASSERT_TRUE(node->await_layers(id, 0, 3, held_tokens, other->name()));
  other->work();
  EXPECT_TRUE(events->until([&] { return other->done() == 2; }));
  EXPECT_EQ(events->of(id).done, 0);
  ASSERT_EQ(ask(*first, "tell 4"), "ok");
  EXPECT_TRUE(has_done(1));
}

TEST_P(held_streams, do_not_wait_for_tokens_of_the_prefix) {
  ASSERT_EQ(ask(*first, "send r 50 7"), "ok");
  const auto id = take(21);
  ASSERT_TRUE(node->await_layers(id, 0, held_layers, 21, stream->name()));
  stream->work();
  EXPECT_TRUE(has_done(1));
  ASSERT_TRUE(node->await_layers(id, 0, held_layers, 22, stream->name()));
  stream->work();
  ASSERT_TRUE(stand(1));
  ASSERT_EQ(ask(*first, "compute 4"), "ok");
  EXPECT_EQ(stream->done(), 1);
  ASSERT_EQ(ask(*first, "tell 4"), "ok");
  ASSERT_EQ(ask(*first, "seal"), "ok");
  EXPECT_TRUE(has_done(2));
}

TEST_P(held_streams, go_on_when_the_prefill_process_is_killed) {
  const auto id = hold_one();
  first->end(SIGKILL);
  ASSERT_TRUE(has_done(1));
  expect_lost(id);
}

TEST_P(held_streams, go_on_when_the_receive_comes_to_its_deadline) {
  const auto id = take(0, 3s);  // no node offers it
  hold(id);
  ASSERT_TRUE(has_done(1));
  ASSERT_TRUE(events->outcome(id));
  EXPECT_EQ(events->of(id).why.code, errc::deadline);
}

TEST_P(held_streams, go_on_when_the_receive_is_aborted) {
  const auto id = hold_one();
  ASSERT_TRUE(node->abort(id, "client went away"));
  ASSERT_TRUE(has_done(1));
  ASSERT_TRUE(events->outcome(id));
  EXPECT_EQ(events->of(id).why.code, errc::aborted);
}

TEST_P(held_streams, go_on_when_the_prefill_engine_gives_up) {
  const auto id = hold_one();
  first->channel().say("end");
  ASSERT_TRUE(has_done(1));
  ASSERT_TRUE(events->outcome(id));
  EXPECT_EQ(events->of(id).failed, 1);
}

TEST_P(held_streams, go_on_when_their_node_stops) {
  (void)hold_one();
  node->stop();
  EXPECT_TRUE(has_done(1));
}

TEST_P(held_streams, of_a_receive_that_stands_in_line_for_blocks_are_held_and_go_on) {
  const auto free = node->report().pool.blocks_free;
  auto rest = node->allocate_blocks(static_cast<std::uint32_t>(free));
  ASSERT_TRUE(rest);
  ASSERT_EQ(ask(*first, "send r 50 7"), "ok");
  const auto id = receive("r", held_tokens);
  ASSERT_TRUE(node->await_layers(id, 0, held_layers, 0, stream->name()));  // nothing to wait for
  stream->work();
  EXPECT_TRUE(has_done(1));
  ASSERT_TRUE(node->await_layers(id, 0, held_layers, held_tokens, stream->name()));
  stream->work();
  ASSERT_TRUE(stand(1));
  ASSERT_TRUE(node->free_blocks(rest->owner, rest->blocks));
  ASSERT_TRUE(events->moving());
  EXPECT_EQ(stream->done(), 1);
  ASSERT_EQ(ask(*first, "ready 4"), "ok");
  ASSERT_EQ(ask(*first, "seal"), "ok");
  EXPECT_TRUE(has_done(2));
}

TEST_P(held_streams, are_not_held_by_a_call_that_is_refused) {
  ASSERT_EQ(ask(*first, "send r 50 7"), "ok");
  const auto id = take();
  EXPECT_EQ(refusal({}, 0, 1, held_tokens), errc::not_found);
  EXPECT_EQ(refusal(id, 0, held_layers + 1, held_tokens), errc::out_of_range);
  EXPECT_EQ(refusal(id, 2, 2, held_tokens), errc::out_of_range);
  EXPECT_EQ(refusal(id, 0, 1, held_tokens + 1), errc::out_of_range);
  const auto sent = node->send({"mine", blocks.blocks});
  ASSERT_TRUE(sent);
  EXPECT_EQ(refusal(*sent, 0, 1, 1), errc::not_found) << "no receive";
  const auto elsewhere = node->await_layers(id, 0, 1, held_tokens, {stream->name().handle, 77});
  ASSERT_FALSE(elsewhere);
  EXPECT_EQ(elsewhere.error().code, errc::invalid_config);
  stream->work();
  EXPECT_TRUE(has_done(1));
  ASSERT_EQ(ask(*first, "ready 4"), "ok");
  ASSERT_EQ(ask(*first, "seal"), "ok");
  ASSERT_TRUE(events->outcome(id));
  stream->work();
  EXPECT_TRUE(has_done(2));
}

TEST_P(held_streams, are_not_held_of_a_receive_that_is_done_also_when_its_events_were_taken) {
  ASSERT_EQ(ask(*first, "send r 50 7"), "ok");
  const auto id = take();
  ASSERT_EQ(ask(*first, "ready 4"), "ok");
  ASSERT_EQ(ask(*first, "seal"), "ok");
  ASSERT_TRUE(events->unpinned(id));
  ASSERT_EQ(events->of(id).done, 1) << to_string(events->of(id).why);
  for (std::uint32_t layer = 0; layer < held_layers; ++layer) {
    ASSERT_NO_FATAL_FAILURE(read_behind(id, layer));
  }
  ASSERT_TRUE(has_done(held_layers));
  for (std::uint32_t layer = 0; layer < held_layers; ++layer) EXPECT_EQ(wrong[layer], 0);
  EXPECT_EQ(refusal(id, 0, held_layers + 1, held_tokens), errc::out_of_range);
  EXPECT_EQ(refusal(id, 0, 1, held_tokens + 1), errc::out_of_range);
}

TEST_P(held_streams, are_not_held_of_a_receive_that_failed_whose_error_is_told) {
  const auto id = hold_one();
  ASSERT_TRUE(node->abort(id, "client went away"));
  ASSERT_TRUE(events->unpinned(id));
  const auto late = node->await_layers(id, 0, 1, held_tokens, stream->name());
  ASSERT_FALSE(late);
  EXPECT_EQ(late.error().code, events->of(id).why.code);
  EXPECT_EQ(late.error().message, events->of(id).why.message);
  stream->work();
  EXPECT_TRUE(has_done(2));
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(held_streams);
INSTANTIATE_TEST_SUITE_P(over_gpus, held_streams, ::testing::ValuesIn(gpu_ways()), name_of);
INSTANTIATE_TEST_SUITE_P(over_nics, held_streams, ::testing::ValuesIn(nic_ways()), name_of);

}  // namespace
}  // namespace troupe::testing
