// More batches at once than a transport takes over one link.

#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "troupe/transport/backend.hpp"

#include "cluster_fixture.hpp"
#include "waiting.hpp"

namespace troupe::testing {

namespace {

constexpr std::uint32_t layers = 8;
/// Each request has a batch in flight per layer: together they exceed the transport's limit.
constexpr std::uint32_t requests = 600;
static_assert(requests * layers > transport::link_options{}.max_batches + layers);

cluster_options many() {
  auto options = unhurried();
  options.backend = "tcp";
  options.model = "{layers: 8, kv_heads: 1, head_dim: 8, dtype: fp16, block_tokens: 16}";
  options.prefill_pool = options.decode_pool = "4MiB";
  return options;
}

}  // namespace

/// The decode side reads only when the test polls it, so no write is acknowledged before that.
TEST(crowded_link, batches_beyond_what_the_transport_takes_wait_and_no_transfer_fails) {
  const cluster c{many()};
  const auto prefill = c.start("prefill-0");
  engine_options polled;
  polled.polling = true;
  const auto decode = c.start("decode-0", std::move(polled));
  ASSERT_TRUE(prefill && decode);
  std::uint32_t wanted = 0;
  std::uint32_t sent = 0;
  std::uint32_t received = 0;
  const auto hear = [&](engine& node, std::uint32_t& done) {
    for (auto& e : node.take()) {
      if (std::holds_alternative<event_wanted>(e.what)) ++wanted;
      if (std::holds_alternative<event_done>(e.what)) ++done;
      if (const auto* failed = std::get_if<event_failed>(&e.what))
        ADD_FAILURE() << to_string(failed->why);
    }
  };
  const auto look = [&] {
    (void)decode->poll();
    hear(*decode, received);
    hear(*prefill, sent);
  };

  std::vector<operation_id> sends;
  for (std::uint32_t r = 0; r < requests; ++r) {
    const auto name = "r" + std::to_string(r);
    const auto blocks = prefill->allocate_blocks(1);
    ASSERT_TRUE(blocks) << to_string(blocks.error());
    send_spec send;
    send.request = name;
    send.blocks = blocks->blocks;
    send.tell_wanted = true;
    const auto offered = prefill->send(std::move(send));
    ASSERT_TRUE(offered) << to_string(offered.error());
    sends.push_back(*offered);
    receive_spec receive;
    receive.request = name;
    receive.sources = {"prefill-0"};
    receive.tokens = 16;
    const auto asked = decode->receive(std::move(receive));
    ASSERT_TRUE(asked) << to_string(asked.error());
    look();
  }
  ASSERT_TRUE(comes_true([&] {
    look();
    return wanted == requests;
  })) << wanted;

  for (std::uint32_t layer = 0; layer < layers; ++layer) {
    for (const auto send : sends) ASSERT_TRUE(prefill->layers_ready(send, layer, layer + 1, 16));
    // Otherwise several layers go in one batch.
    ASSERT_TRUE(comes_true([&] {
      const auto report = prefill->report();
      return !report.links.empty() && report.links.front().in_flight > 0;
    }));
    std::this_thread::sleep_for(std::chrono::milliseconds{50});
    hear(*prefill, sent);
  }
  for (const auto send : sends) ASSERT_TRUE(prefill->seal(send, 16));
  ASSERT_TRUE(comes_true([&] {
    look();
    return sent == requests && received == requests;
  })) << sent
      << " sent, " << received << " received";
  EXPECT_EQ(prefill->report().links.front().rebuilds, 0U);
}

}  // namespace troupe::testing
