#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "troupe/actors/cluster_client.hpp"
#include "troupe/actors/runtime/system.hpp"
#include "troupe/actors/supervisor/supervisor.hpp"
#include "troupe/config/parse.hpp"
#include "troupe/config/resolve.hpp"
#include "troupe/deploy/child_process.hpp"
#include "troupe/deploy/reference_engine/calls.hpp"

#include "cache_fixture.hpp"
#include "scratch_folder.hpp"
#include "text_of.hpp"
#include "waiting.hpp"

/// Real processes: one per node; the supervisor and the frontend run in the test's process.
namespace troupe::reference {

/// The differences between the variants of the tests.
struct cluster_shape {
  std::string name;
  std::string backend{"auto"};
  std::string model{"{layers: 3, kv_heads: 2, head_dim: 8, dtype: bf16, block_tokens: 4}"};
  std::string prefill_layout{"{}"}, decode_layout{"{}"};
  std::uint32_t prefill_ranks{1}, decode_ranks{1};
  std::string prefill_pool{"1MiB"}, decode_pool{"1MiB"};
  std::string cache{};  ///< `--cache` of the nodes
  std::string mode{"write"};
};

using testing::comes_true;
using testing::wait_limit;

class cluster {
 public:
  explicit cluster(const cluster_shape& shape) : shape_{shape} {
    start_supervisor();
    for (const auto& node : config::resolve(deployment_)) {
      if (node.role == config::role::supervisor) continue;
      (node.role == config::role::prefill ? prefill_ : decode_).push_back(node.name);
      start_node(node.name);
    }
    wait_until_up();
  }
  ~cluster() {
    for (auto& child : children_) child.terminate();
    for (auto& child : children_) EXPECT_TRUE(child.stop(wait_limit));
    if (::testing::Test::HasFailure()) print_logs();
    client_.reset();
  }
  cluster(const cluster&) = delete;
  cluster& operator=(const cluster&) = delete;

  [[nodiscard]] const std::vector<std::string>& prefill() const { return prefill_; }
  [[nodiscard]] const std::vector<std::string>& decode() const { return decode_; }
  [[nodiscard]] actors::cluster_client& client() { return *client_; }

  result<payload> call(const std::string& node, const std::string& method, payload what,
                       std::chrono::milliseconds timeout = wait_limit) {
    return client_->call(node,
                         {method, std::move(what), static_cast<std::uint32_t>(timeout.count())});
  }
  std::future<result<payload>> call_later(const std::string& node, const std::string& method,
                                          payload what) {
    return std::async(std::launch::async, [this, node, method, what = std::move(what)]() mutable {
      return call(node, method, std::move(what));
    });
  }
  model_reply model() {
    return model_reply_from(call(decode_.front(), "model", {'{', '}'}).value()).value();
  }

  /// Waits until the node has taken blocks for a request.
  void wait_until_it_holds_blocks(const std::string& name) {
    EXPECT_TRUE(comes_true([&] {
      const auto pool = client_->report(name).value().pool;
      return pool.blocks_free < pool.blocks_total;
    })) << name
        << " took no blocks";
  }

  /// Waits until a receive of the decode side is parked at that node.
  void wait_until_it_is_asked(const std::string& name) {
    EXPECT_TRUE(comes_true([&] { return !client_->report(name).value().parked.empty(); }))
        << name << " was asked for nothing";
  }

  /// Expects that all blocks of every node are free and no request of another node is parked. Waits
  /// a little for quarantines and messages in flight.
  void expect_nothing_is_held() {
    for (const auto& node : {prefill_, decode_})
      for (const auto& name : node) {
        actors::node_report now;
        (void)comes_true([&] {
          now = client_->report(name).value();
          return now.pool.blocks_free == now.pool.blocks_total && now.parked.empty();
        });
        EXPECT_EQ(now.pool.blocks_free, now.pool.blocks_total) << name;
        EXPECT_EQ(now.pool.blocks_quarantined, 0u) << name;
        EXPECT_TRUE(now.parked.empty()) << name;
      }
  }

 private:
  void start_supervisor() {
    const auto parsed = config::parse(deployment_text(1), "test");
    ASSERT_TRUE(parsed.value) << config::to_string(parsed.issues);
    deployment_ = *parsed.value;
    host_ = std::make_unique<actors::actor_host>();
    const auto supervisor =
        actors::spawn_supervisor(host_->system(), actors::supervisor_options_from(deployment_));
    port_ = host_->publish(supervisor, "127.0.0.1", 0).value();
    std::ofstream{folder_.path() + "/deployment.yaml"} << deployment_text(port_);
  }

  [[nodiscard]] std::string deployment_text(std::uint16_t port) const {
    std::ostringstream yaml;
    const auto stage = [&](const char* name, std::uint32_t ranks, const std::string& layout,
                           const std::string& pool) {
      yaml << "  - {name: " << name << ", role: " << name << ", tensor_parallel: " << ranks
           << ", layout: " << layout << ", pool: {size: " << pool
           << "}, transport: {backend: " << shape_.backend
           << ", peer_silence: 1min, connect_timeout: 1min}}\n";
    };
    yaml
        << "cluster: test\nsupervisor: {port: " << port
        << ", heartbeat_interval: 100ms, heartbeat_timeout: 30min}\nsecurity: {mode: none}\nmodel: "
        << shape_.model << "\nstages:\n";
    stage("prefill", shape_.prefill_ranks, shape_.prefill_layout, shape_.prefill_pool);
    stage("decode", shape_.decode_ranks, shape_.decode_layout, shape_.decode_pool);
    yaml << "edges: [{from: prefill, to: decode, mode: " << shape_.mode << "}]\n"
         << "limits: {transfer_deadline: 10min, source_lease: 10min}\n";
    return yaml.str();
  }

  void start_node(const std::string& name) {
    std::vector<std::string> arguments{"node", folder_.path() + "/deployment.yaml", "--name", name};
    if (!shape_.cache.empty()) arguments.insert(arguments.end(), {"--cache", shape_.cache});
    auto child = deploy::child_process::start(REFERENCE_NODE, arguments,
                                              folder_.path() + "/" + name + ".log");
    EXPECT_TRUE(child) << child.error().message;
    if (child) children_.push_back(std::move(*child));
  }

  void wait_until_up() {
    client_ = actors::cluster_client::connect({.port = port_, .timeout = wait_limit}).value();
    const auto all_are_up = [&] {
      const auto members = client_->members().value();
      const auto up = std::ranges::count_if(members.members, [](const auto& m) {
        return m.state == static_cast<std::uint8_t>(actors::node_state::up);
      });
      return static_cast<std::size_t>(up) == children_.size();
    };
    if (comes_true(all_are_up)) return;
    print_logs();
    GTEST_FAIL() << "the nodes did not come up";
  }

  void print_logs() const {
    for (const auto& entry : std::filesystem::directory_iterator{folder_.path()}) {
      std::cerr << "---- " << entry.path().filename() << "\n"
                << testing::text_of(entry.path()) << "\n";
    }
  }

  cluster_shape shape_;
  config::deployment deployment_;
  testing::scratch_folder folder_{"engine"};
  std::unique_ptr<actors::actor_host> host_;
  std::uint16_t port_{0};
  std::vector<std::string> prefill_, decode_;
  std::vector<deploy::child_process> children_;
  std::unique_ptr<actors::cluster_client> client_;
};

}  // namespace troupe::reference
