#pragma once

/// Two prefill and two decode nodes on a network of their own, for one kind of failure at a time,
/// many times over. If no network can be made, the tests that need none run on 127.0.0.1.

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <future>
#include <iostream>
#include <memory>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "cluster_processes.hpp"
#include "judge.hpp"
#include "orders.hpp"
#include "process_memory.hpp"
#include "seed.hpp"
#include "waiting.hpp"

namespace troupe::testing {

using namespace std::chrono_literals;
using std::chrono::milliseconds;

/// As short as possible on a machine that stalls for a second now and then: a healthy node must not
/// be missed.
inline constexpr milliseconds heartbeats_missed{3000};

/// How often each failure is provoked in each of the two modes; half as often if it takes seconds.
/// TROUPE_FAULT_ROUNDS overrides it.
inline int fault_rounds() {
  const char* text = std::getenv("TROUPE_FAULT_ROUNDS");
  return text != nullptr ? std::atoi(text) : sanitized ? 2 : 10;
}

using call_outcome = result<std::vector<std::uint8_t>>;

class row : public ::testing::TestWithParam<std::string> {
 protected:
  cluster_shape shape;
  std::optional<network> net;
  std::unique_ptr<cluster_processes> cluster;
  std::unique_ptr<actors::cluster_client> client;
  std::mt19937_64 dice{testing::printed_seed()};
  int requests{0};

  row() {
    shape.prefills = 2;
    shape.decodes = 2;
    shape.mode = GetParam();
    shape.heartbeat_interval = 100ms;
    // No node may be lost just because the machine stalled for a while.
    shape.heartbeat_timeout = 10min;
    shape.peer_silence = 1min;
    shape.transport_more = ", connect_timeout: 1min";
  }
  /// For failures that only the silence of a peer shows.
  void notice_silence() {
    shape.peer_silence = 500ms;
    shape.transport_more.clear();
  }
  void notice_missing_heartbeats() { shape.heartbeat_timeout = heartbeats_missed; }
  void SetUp() override {
    keep_pages_small();
    if (!network::missing()) {
      net.emplace(node_names(shape), addresses::loopback);
      ASSERT_EQ(net->why(), "");
      net->slow_down(300);
    }
    cluster = std::make_unique<cluster_processes>(shape, net ? &*net : nullptr);
    cluster->start_all();
    client = cluster->client(10s);
    ASSERT_TRUE(cluster->all_up(*client)) << "the cluster did not come up";
    if (shape.decode_block_tokens != 16) return;
    // Until every node knows every other one.
    for (const auto* prefill : {"prefill-0", "prefill-1"}) {
      for (const auto* decode : {"decode-0", "decode-1"}) expect_served(prefill, decode);
    }
  }
  void TearDown() override {
    if (!cluster) return;
    for (const auto& e : cluster->revive())
      ADD_FAILURE() << e.name << " " << e.how << "\n" << e.log;
    if (net) net->mend_all();
    for (const auto& wrong : what_is_not_at_rest(*cluster, *client)) ADD_FAILURE() << wrong;
    for (const auto& v : cluster->violations()) ADD_FAILURE() << v;
    if (HasFailure()) {
      cluster->keep_files();
      std::cout << "the logs of all processes are in " << cluster->folder() << std::endl;
    }
  }
  /// The ports at which a node's process listens.
  [[nodiscard]] std::vector<std::uint16_t> ports_of(const std::string& name) const {
    std::ifstream in{"/proc/" + std::to_string(cluster->pid(name)) + "/net/tcp"};
    std::vector<std::uint16_t> ports;
    std::string line;
    while (std::getline(in, line)) {
      std::istringstream words{line};
      std::string slot, local, remote, state;
      words >> slot >> local >> remote >> state;
      const auto colon = local.find(':');
      if (state == "0A" && colon != std::string::npos)
        ports.push_back(
            static_cast<std::uint16_t>(std::stoul(local.substr(colon + 1), nullptr, 16)));
    }
    return ports;
  }
  [[nodiscard]] std::uint64_t resident_bytes_of(const std::string& name) const {
    return resident_bytes(cluster->pid(name));
  }
  void settle() const { ASSERT_TRUE(cluster->all_up(*client)) << "not all nodes are up again"; }
  milliseconds within(milliseconds time) {
    return milliseconds{dice() % static_cast<std::uint64_t>(time.count())};
  }

  // -- one request

  struct transfer {
    std::string request;
    std::uint64_t seed{0};
    std::uint32_t tokens{500};
    milliseconds deadline{2 * wait_limit};
    milliseconds per_layer{30};  ///< for each of four layers
    bool fail_when_full{false};
    milliseconds use{0};
  };
  transfer next() {
    transfer t;
    t.request = "r" + std::to_string(++requests);
    t.seed = dice();
    return t;
  }
  call_outcome call(const std::string& node, const std::string& method, call_bytes payload,
                    milliseconds timeout = wait_limit) {
    actors::call_request order;
    order.method = method;
    order.payload = std::move(payload);
    order.timeout_ms = static_cast<std::uint32_t>(timeout.count());
    return client->call(node, order);
  }
  void offer(const std::string& prefill, const transfer& t) {
    const auto offered =
        call(prefill, "prefill",
             encode(prefill_order{t.request, t.tokens, t.seed, t.deadline, t.per_layer}));
    ASSERT_TRUE(offered) << prefill << ": " << to_string(offered.error());
  }
  /// The decode engine's outcome; the future is ready soon after the deadline at the latest.
  std::future<call_outcome> take(const std::string& decode, const std::string& prefill,
                                 const transfer& t) {
    decode_order order{t.request, prefill, shape.mode, t.tokens, t.seed, t.deadline, t.use};
    order.fail_when_full = t.fail_when_full;
    return std::async(std::launch::async, [this, decode, order, limit = t.deadline + wait_limit] {
      return call(decode, "decode", encode(order), limit);
    });
  }
  /// Offers the request at the prefill engine and lets the decode engine take it. Returns the
  /// decode engine's outcome.
  std::future<call_outcome> hand_over(const std::string& prefill, const std::string& decode,
                                      const transfer& t) {
    offer(prefill, t);
    return take(decode, prefill, t);
  }
  /// The outcome of a node's operation, as text.
  std::string outcome(const std::string& node, const transfer& t) {
    const auto known = call(node, "outcome", {t.request.begin(), t.request.end()});
    return known ? std::string{known->begin(), known->end()}
                 : "no answer: " + to_string(known.error());
  }
  static std::string in_words(const call_outcome& outcome) {
    return outcome ? "done" : to_string(outcome.error());
  }
  /// Waits until both nodes are busy with the transfer, so that the next step hits it in the
  /// middle.
  void wait_until_it_moves(const std::string& prefill, const std::string& decode) {
    const auto busy = [&](const std::string& name) {
      const auto report = client->report(name);
      return report && !report->transfers.empty();
    };
    ASSERT_TRUE(comes_true([&] { return busy(decode) && busy(prefill); }, 5ms))
        << "nothing moves from " << prefill << " to " << decode;
  }
  /// Serves a whole request. After a network is mended, late packets may still end a link, or delay
  /// an answer for longer than a dial waits; so the test tries again for a while, like a user.
  void expect_served(const std::string& prefill, const std::string& decode) {
    const auto until = end_of_wait();
    for (;;) {
      auto t = next();
      t.per_layer = 0ms;
      const auto taken = hand_over(prefill, decode, t).get();
      if (taken) {
        EXPECT_EQ(outcome(prefill, t), "done");
        return;
      }
      EXPECT_THAT(in_words(taken), ::testing::AnyOf(::testing::StartsWith("peer_lost: "),
                                                    ::testing::StartsWith("link_broken: "),
                                                    ::testing::StartsWith("peer_unreachable: ")));
      (void)call(prefill, "abort", {t.request.begin(), t.request.end()});
      ASSERT_LT(std::chrono::steady_clock::now(), until)
          << prefill << " serves " << decode << " no more: " << in_words(taken);
    }
  }
};

}  // namespace troupe::testing
