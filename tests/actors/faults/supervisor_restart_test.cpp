// The supervisor is killed under running transfers and comes back at its port. Every process is
// real.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>

#include "troupe/actors/cluster_client.hpp"
#include "troupe/actors/membership/membership_store.hpp"

#include "cluster_fixture.hpp"
#include "parsed_deployment.hpp"
#include "scratch_folder.hpp"

namespace troupe::testing {
namespace {

using actors::membership;
using actors::node_state;
using ::testing::HasSubstr;

constexpr std::uint32_t tokens = 50;

/// Two replicas of each stage, each in a process of its own. decode-N receives from prefill-N
/// without end. A second supervisor, forked before there are threads, waits to replace the first.
class restarted_supervisor : public ::testing::Test {
 protected:
  explicit restarted_supervisor(std::chrono::milliseconds interval = 1s) : interval_{interval} {
    first_ = std::make_unique<forked>([this](line_channel& c) { return supervise(c); });
    second_ = std::make_unique<forked>([this](line_channel& c) { return supervise(c); });
    first_->channel().say("0");
    port_ = std::stoi(first_->channel().hear().value_or("0"));
    for (const int pair : {0, 1}) {
      decodes_.push_back(node("decode-" + std::to_string(pair), pair, take_for_ever));
      prefills_.push_back(node("prefill-" + std::to_string(pair), pair, give_for_ever));
    }
  }
  /// Kills the first supervisor, and starts the second at its port.
  void replace_after(std::chrono::milliseconds pause) {
    first_->end(SIGKILL);
    std::this_thread::sleep_for(pause);
    second_->channel().say(std::to_string(port_));
    EXPECT_EQ(second_->channel().hear().value_or("silence"), std::to_string(port_));
  }
  void connect() {
    auto client =
        actors::cluster_client::connect({.port = static_cast<std::uint16_t>(port_),
                                         .timeout = wait_limit,
                                         .actors = {.connection_timeout = 10 * wait_limit}});
    ASSERT_TRUE(client) << to_string(client.error());
    client_ = std::move(*client);
  }
  [[nodiscard]] membership members() {
    auto all = client_->members();
    return all ? std::move(*all) : membership{};
  }
  static bool all_up(const membership& m) {
    return m.members.size() == 4 && std::ranges::all_of(m.members, [](const auto& one) {
             return actors::node_state_from(one.state) == node_state::up;
           });
  }
  bool becomes_whole() {
    return comes_true([&] { return all_up(members()); }, 10ms);
  }
  /// Ends both pairs. Expects no failure at either side and no wrong byte.
  void expect_no_failure() {
    for (const std::size_t pair : {0u, 1u}) {
      decodes_[pair]->channel().say("end");
      const auto taken = decodes_[pair]->channel().hear().value_or("silence");
      prefills_[pair]->channel().say("end");
      const auto given = prefills_[pair]->channel().hear().value_or("silence");
      EXPECT_THAT(taken, HasSubstr("failed 0 wrong 0")) << "decode-" << pair;
      EXPECT_THAT(given, HasSubstr("failed 0")) << "prefill-" << pair;
    }
  }
  [[nodiscard]] static std::string ask(forked& child, const std::string& line) {
    child.channel().say(line);
    return child.channel().hear().value_or("silence");
  }
  /// Expects more transfers to be done from now on.
  static void expect_progress(forked& child) {
    const auto before = std::stol(ask(child, "count"));
    EXPECT_TRUE(comes_true([&] { return std::stol(ask(child, "count")) >= before + 3; }, 20ms))
        << "transfers stand still";
  }

  std::chrono::milliseconds interval_;
  scratch_folder folder_{"restart"};
  int port_{0};
  std::unique_ptr<forked> first_, second_;
  std::vector<std::unique_ptr<forked>> prefills_, decodes_;
  std::unique_ptr<actors::cluster_client> client_;

 private:
  [[nodiscard]] config::deployment deployment(int port) const {
    auto of = parsed_deployment(
        "cluster: test\nsupervisor: {host: 127.0.0.1, port: " + std::to_string(port) +
        ", heartbeat_timeout: 10min}\n"
        "security: {mode: none}\n"
        "model: {layers: 4, kv_heads: 2, head_dim: 32, dtype: fp16, block_tokens: 16}\n"
        "limits: {transfer_deadline: 10min}\n"
        "stages:\n"
        "  - {name: prefill, role: prefill, replicas: 2, engine: external, pool: {size: 1MiB}, "
        "transport: {peer_silence: 1min, connect_timeout: 1min}}\n"
        "  - {name: decode, role: decode, replicas: 2, engine: external, pool: {size: 1MiB}, "
        "transport: {peer_silence: 1min, connect_timeout: 1min}}\n"
        "edges:\n  - {from: prefill, to: decode, mode: write}\n");
    of.supervisor.heartbeat_interval = interval_;
    of.supervisor.heartbeat_timeout = std::max(of.supervisor.heartbeat_timeout, 3 * interval_);
    return of;
  }

  /// Waits for a port, then runs the supervisor there.
  int supervise(line_channel& channel) const {
    cluster::quiet("supervisor");
    const auto port = channel.order();
    if (!port) return 0;
    auto store = actors::membership_store::open(folder_.path() + "/test.state", "test");
    if (!store) {
      channel.say(to_string(store.error()));
      return 1;
    }
    const auto of = deployment(std::stoi(*port));
    auto made = actors::host_options_of(of);
    if (!made) {
      channel.say(to_string(made.error()));
      return 1;
    }
    actors::actor_host host{std::move(*made)};
    auto options = actors::supervisor_options_from(of);
    options.store = std::move(*store);
    auto bound = host.publish(actors::spawn_supervisor(host.system(), std::move(options)),
                              "127.0.0.1", static_cast<std::uint16_t>(std::stoi(*port)));
    channel.say(bound ? std::to_string(*bound) : to_string(bound.error()));
    while (channel.order()) {
    }
    return 0;
  }

  [[nodiscard]] std::unique_ptr<forked> node(const std::string& name, int pair,
                                             int (*body)(engine&, line_channel&, int)) const {
    return std::make_unique<forked>([this, name, pair, body](line_channel& channel) {
      cluster::quiet(name);
      auto started = engine::start(deployment(port_), name);
      if (!started || !(*started)->wait_registered(wait_limit)) return 1;
      return body(**started, channel, pair);
    });
  }

  /// Answers what the test asks meanwhile. Returns false if the node is to end.
  static bool answer(engine& node, listener& events, line_channel& channel, long done) {
    const auto line = channel.hear(2ms);
    if (!line) return true;
    if (*line == "end") return false;
    if (*line == "count") channel.say(std::to_string(done));
    if (line->starts_with("place ")) {
      const auto time_ms = static_cast<std::uint32_t>(std::stoul(line->substr(6)));
      auto asked = node.place({"placed", "prefill", "decode", time_ms, {}});
      if (!asked) {
        channel.say(to_string(asked.error()));
      } else {
        (void)events.outcome(*asked);
        const auto& t = events.of(*asked);
        channel.say(t.failed > 0 ? to_string(t.why) : "placed");
      }
    }
    return true;
  }
  static std::string request(int pair, long number) {
    return "r-" + std::to_string(pair) + "-" + std::to_string(number);
  }

  static int give_for_ever(engine& node, line_channel& channel, int pair) {
    cache_bytes cache{node};
    listener events{node};
    long failed = 0;
    channel.say("up");
    for (long number = 0;; ++number) {
      auto blocks = node.allocate_blocks((tokens + 15) / 16);
      if (!blocks) return 2;
      auto sent = node.send({request(pair, number), blocks->blocks});
      if (!sent) return 3;
      const auto seed = static_cast<std::uint64_t>(number);
      for (const std::uint32_t layer : {0u, 2u}) {
        cache.fill(blocks->blocks, layer, layer + 2, 0, tokens, seed);
        (void)node.layers_ready(*sent, layer, layer + 2, tokens);
      }
      (void)node.seal(*sent, tokens);
      // Answer at least once per transfer, even if transfers end so fast that nothing is waited
      // for.
      bool ends = !answer(node, events, channel, number);
      while (!ends && !events.unpinned(*sent, 5ms)) ends = !answer(node, events, channel, number);
      failed += events.of(*sent).failed;
      if (ends) {
        channel.say("failed " + std::to_string(failed));
        return 0;
      }
      events.forget(*sent);
      (void)node.free_blocks(blocks->owner, blocks->blocks);
    }
  }

  static int take_for_ever(engine& node, line_channel& channel, int pair) {
    cache_bytes cache{node};
    listener events{node};
    long failed = 0;
    std::size_t wrong = 0;
    bool ends = false;
    channel.say("up");
    for (long number = 0; !ends; ++number) {
      auto asked = node.receive({request(pair, number),
                                 {"prefill-" + std::to_string(pair)},
                                 actors::transfer_mode::write,
                                 tokens});
      if (!asked) return 2;
      // The transfer is taken to its end.
      while (!events.unpinned(*asked, 5ms)) {
        ends = ends || !answer(node, events, channel, number);
      }
      auto& t = events.of(*asked);
      failed += t.failed;
      if (t.failed > 0) std::fprintf(stderr, "%s\n", to_string(t.why).c_str());
      if (t.allocated) {
        wrong +=
            cache.differing(t.allocated->blocks, 0, tokens, static_cast<std::uint64_t>(number));
        (void)node.free_blocks(t.allocated->owner, t.allocated->blocks);
      }
      events.forget(*asked);
      ends = ends || !answer(node, events, channel, number);
    }
    channel.say("failed " + std::to_string(failed) + " wrong " + std::to_string(wrong));
    return 0;
  }
};

TEST_F(restarted_supervisor,
       has_its_cluster_back_before_anybody_is_given_up_and_no_transfer_fails) {
  for (auto* nodes : {&prefills_, &decodes_}) {
    for (auto& one : *nodes) ASSERT_EQ(one->channel().hear().value_or("silence"), "up");
  }
  ASSERT_NO_FATAL_FAILURE(connect());
  ASSERT_TRUE(becomes_whole());
  const auto before = members();
  for (auto& one : decodes_) expect_progress(*one);

  replace_after(1500ms);
  EXPECT_TRUE(becomes_whole());
  const auto after = members();
  EXPECT_NE(after.supervisor_incarnation, before.supervisor_incarnation);
  EXPECT_GT(after.epoch, before.epoch);
  ASSERT_EQ(after.members.size(), before.members.size());
  for (std::size_t i = 0; i < before.members.size(); ++i) {
    EXPECT_EQ(after.members[i].node.name, before.members[i].node.name);
    EXPECT_EQ(after.members[i].node.replica, before.members[i].node.replica);
    EXPECT_EQ(after.members[i].node.incarnation, before.members[i].node.incarnation);
  }
  for (auto& one : decodes_) expect_progress(*one);
  expect_no_failure();
}

/// Slower than a file may ask for. A node that looked for the supervisor only with its next
/// heartbeat would be too late for every wait.
class restarted_between_slow_heartbeats : public restarted_supervisor {
 protected:
  restarted_between_slow_heartbeats() : restarted_supervisor{10 * wait_limit} {}
};

TEST_F(restarted_between_slow_heartbeats, is_found_long_before_the_next_one) {
  for (auto* nodes : {&prefills_, &decodes_}) {
    for (auto& one : *nodes) ASSERT_EQ(one->channel().hear().value_or("silence"), "up");
  }
  ASSERT_NO_FATAL_FAILURE(connect());
  ASSERT_TRUE(becomes_whole());
  for (auto& one : decodes_) expect_progress(*one);
  replace_after(300ms);
  EXPECT_TRUE(becomes_whole()) << "nobody may have looked for it before the next heartbeat";
  expect_no_failure();
}

TEST_F(restarted_supervisor,
       is_missed_by_placements_alone_which_fail_clearly_and_wait_once_it_is_back) {
  for (auto* nodes : {&prefills_, &decodes_}) {
    for (auto& one : *nodes) ASSERT_EQ(one->channel().hear().value_or("silence"), "up");
  }
  EXPECT_EQ(ask(*prefills_[0], "place 600000"), "placed");
  for (auto& one : decodes_) expect_progress(*one);
  first_->end(SIGKILL);
  std::this_thread::sleep_for(300ms);
  EXPECT_THAT(ask(*prefills_[0], "place 600000"), HasSubstr("the supervisor"));
  for (auto& one : decodes_) expect_progress(*one);
  replace_after(0ms);
  // The new supervisor knows the former members: a queued request is placed as soon as they are
  // back.
  ASSERT_NO_FATAL_FAILURE(connect());
  const auto time_ms = static_cast<std::uint32_t>(std::chrono::milliseconds{wait_limit}.count());
  const auto placed = client_->place({"r", "prefill", "decode", time_ms, {}});
  EXPECT_TRUE(placed) << to_string(placed.error());
  expect_no_failure();
}

TEST_F(restarted_supervisor, whose_predecessor_lives_is_refused_its_state) {
  second_->channel().say("0");
  EXPECT_THAT(second_->channel().hear().value_or("silence"),
              HasSubstr("used by another supervisor"));
}

}  // namespace
}  // namespace troupe::testing
