// Checks what a frontend sees of a deployment on two hosts. `host` runs it on the second one, while
// `troupe up` runs on both.

#include <algorithm>
#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "troupe/actors/cluster_client.hpp"
#include "troupe/deploy/reference_engine/calls.hpp"

namespace troupe::reference {
namespace {

using namespace std::chrono_literals;

constexpr std::uint32_t patience_ms = 60'000;
constexpr std::uint32_t new_tokens = 6;
const sampling how{0.8f, 7, true};

std::unique_ptr<actors::cluster_client> cluster;

bool all_up() {
  const auto members = cluster->members();
  return members && members->members.size() == 3 &&
         std::ranges::all_of(members->members, [](const auto& one) {
           return one.state == static_cast<std::uint8_t>(actors::node_state::up);
         });
}

class both_hosts : public ::testing::Environment {
  void SetUp() override {
    // The first host may start later.
    const auto until = std::chrono::steady_clock::now() + 120s;
    while (std::chrono::steady_clock::now() < until) {
      if (!cluster) {
        auto found =
            actors::cluster_client::connect({.host = "127.0.0.1", .port = 7400, .timeout = 10s});
        if (found) cluster = std::move(*found);
      }
      if (cluster && all_up()) return;
      std::this_thread::sleep_for(200ms);
    }
    FAIL() << "the nodes did not come up";
  }
  void TearDown() override { cluster.reset(); }
};
[[maybe_unused]] const auto* const environment =
    ::testing::AddGlobalTestEnvironment(new both_hosts);

result<payload> call(const actors::node_info& node, const std::string& method, payload what) {
  return cluster->call(node, {method, std::move(what), patience_ms});
}

model_reply model_of(const actors::node_info& node) {
  return model_reply_from(call(node, "model", {'{', '}'}).value()).value();
}

std::vector<token> a_prompt(std::uint32_t tokens, std::uint32_t seed) {
  std::vector<token> prompt;
  for (std::uint32_t i = 0; i < tokens; ++i) {
    prompt.push_back(static_cast<token>((i * 31 + seed * 17) % 200));
  }
  return prompt;
}

struct shape {
  std::uint32_t tokens, chunk;
};

class hosts : public ::testing::TestWithParam<std::string> {};

TEST_P(hosts, continue_each_others_prompts_as_one_process_would) {
  const auto& stage = GetParam();
  std::uint32_t seed = 0;
  for (const auto& [tokens, chunk] : {shape{1, 0}, shape{50, 0}, shape{200, 64}}) {
    const auto id = stage + "-" + std::to_string(tokens);
    const auto where = cluster->place({id, "prefill", stage, patience_ms});
    ASSERT_TRUE(where) << to_string(where.error());
    const auto prompt = a_prompt(tokens, ++seed);
    prefill_call prefill;
    prefill.request = id;
    prefill.prompt = prompt;
    prefill.chunk = chunk;
    prefill.how = how;
    prefill.deadline_ms = patience_ms;
    auto decode = decode_at(*where);
    decode.request = id;
    decode.prompt = prompt;
    decode.max_tokens = new_tokens;
    decode.how = how;
    decode.deadline_ms = patience_ms;
    auto prefilled = std::async(std::launch::async, [&] {
      return call(where->prefill.front(), "prefill", to_json(prefill));
    });
    const auto decoded = call(where->decode.front(), "decode", to_json(decode));
    const auto first = prefilled.get();
    ASSERT_TRUE(first) << to_string(first.error());
    ASSERT_TRUE(decoded) << to_string(decoded.error());
    (void)cluster->finished(id);
    const auto model = model_of(where->decode.front());
    const auto alone = generate_alone(*transformer::create(model.model).value(), prompt, new_tokens,
                                      how, model.dtype, model.block_tokens)
                           .value();
    const auto reply = decode_reply_from(*decoded).value();
    EXPECT_EQ(reply.text, alone) << id;
    EXPECT_GT(reply.bytes, 0u);
  }
}

TEST_P(hosts, are_joined_by_rdma_and_hold_nothing_afterwards) {
  for (const auto& name : {std::string{"prefill-0"}, GetParam() + "-0"}) {
    const auto report = cluster->report(name);
    ASSERT_TRUE(report) << to_string(report.error());
    ASSERT_FALSE(report->links.empty());
    for (const auto& link : report->links) EXPECT_EQ(link.backend, "rdma") << link.reason;
    EXPECT_GE(report->transfers_done, 3u);
    EXPECT_EQ(report->transfers_failed, 0u);
    auto pool = report->pool;
    for (int i = 0; i < 100 && pool.blocks_free != pool.blocks_total; ++i) {
      std::this_thread::sleep_for(100ms);
      pool = cluster->report(name).value().pool;
    }
    EXPECT_EQ(pool.blocks_free, pool.blocks_total) << name;
  }
}

INSTANTIATE_TEST_SUITE_P(of, hosts, ::testing::Values("writes-into", "reads"),
                         [](const auto& stage) {
                           return stage.param == "reads" ? std::string{"a_read"} : "a_write";
                         });

}  // namespace
}  // namespace troupe::reference
