// `troupe drain` as an operator uses it: real processes, with requests in progress.

#include <atomic>
#include <chrono>
#include <csignal>
#include <fstream>
#include <future>
#include <mutex>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "troupe/actors/cluster_client.hpp"
#include "troupe/deploy/reference_engine/calls.hpp"

#include "command.hpp"
#include "text_of.hpp"

namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using namespace std::chrono_literals;
using namespace troupe::testing;

/// Longer than anything in these tests takes.
constexpr std::uint32_t never_ms = 600'000;

/// One prefill, two decode replicas, each of `ranks` nodes.
std::string deployment(std::uint16_t port, int ranks) {
  return "cluster: drain-test\nsupervisor: {host: 127.0.0.1, port: " + std::to_string(port) +
         ", heartbeat_interval: 200ms, heartbeat_timeout: 10min}\n"
         "security: {mode: none}\n"
         "model: {layers: 2, kv_heads: 2, head_dim: 16, dtype: bf16, block_tokens: 16}\n"
         "stages:\n"
         "  - {name: prefill, role: prefill, pool: {size: 1MiB}, transport: {peer_silence: 1min, "
         "connect_timeout: 1min}}\n"
         "  - {name: decode, role: decode, replicas: 2, tensor_parallel: " +
         std::to_string(ranks) +
         ", pool: {size: 1MiB}, transport: {peer_silence: 1min, connect_timeout: 1min}}\n"
         "edges:\n  - {from: prefill, to: decode, mode: write}\n";
}

/// A cluster under `troupe up`, and a frontend of it.
class drained : public ::testing::Test {
 protected:
  void start(int ranks = 1) {
    file_ = folder_.path() + "/deployment.yaml";
    const auto port = free_port();
    std::ofstream{file_} << deployment(port, ranks);
    // Their logs go to files, since a full pipe that is not read would block them.
    up_.emplace(std::vector<std::string>{"up", file_, "--log-dir", folder_.path()});
    ASSERT_TRUE(up_->says(std::to_string(2 + 2 * ranks) + " nodes are up"))
        << up_->out() << up_->err();
    auto client = troupe::actors::cluster_client::connect({.port = port, .timeout = wait_limit});
    ASSERT_TRUE(client) << to_string(client.error());
    client_ = std::move(*client);
  }
  [[nodiscard]] troupe::result<troupe::actors::placement> place(const std::string& id) {
    troupe::actors::placement_request request;
    request.request = id;
    request.timeout_ms = 10'000;
    return client_->place(request);
  }
  std::future<troupe::result<std::vector<std::uint8_t>>> call(const troupe::actors::node_info& node,
                                                              const std::string& method,
                                                              troupe::reference::payload payload) {
    return std::async(std::launch::async, [this, node, method, payload] {
      troupe::actors::call_request request{method, payload, never_ms};
      return client_->call(node, request);
    });
  }
  auto decode(const std::string& id, const troupe::actors::placement& where) {
    auto what = troupe::reference::decode_at(where);
    what.request = id;
    what.prompt = prompt_;
    what.max_tokens = 4;
    what.deadline_ms = never_ms;
    return call(where.decode.front(), "decode", to_json(what));
  }
  /// A whole request. Returns why it failed, or an empty string.
  std::string serve(const std::string& id, std::string& where_to) {
    const auto where = place(id);
    if (!where) return to_string(where.error());
    where_to = where->decode.front().name;
    troupe::reference::prefill_call what;
    what.request = id;
    what.prompt = prompt_;
    what.deadline_ms = never_ms;
    auto prefilling = call(where->prefill.front(), "prefill", to_json(what));
    auto decoding = decode(id, *where);
    const auto first = prefilling.get();
    const auto second = decoding.get();
    (void)client_->finished(id);
    if (!first) return to_string(first.error());
    return second ? std::string{} : to_string(second.error());
  }
  [[nodiscard]] nlohmann::json status_of(const std::string& name) const {
    const auto all = nlohmann::json::parse(run({"status", file_, "--json"}).out);
    for (const auto& node : all.at("nodes"))
      if (node.at("name") == name) return node;
    return {};
  }
  void stop() {
    up_->signal(SIGINT);
    EXPECT_EQ(up_->wait(), 0) << up_->err();
    EXPECT_THAT(up_->out(), HasSubstr("all nodes stopped"));
  }

  const std::vector<troupe::reference::token> prompt_ =
      troupe::reference::encode_text("drained and gone");
  scratch_folder folder_;
  std::string file_;
  std::optional<command> up_;
  std::unique_ptr<troupe::actors::cluster_client> client_;
};

/// Sends one request after the other, on several threads, until `end`.
class load {
 public:
  using serve_fn = std::function<std::string(const std::string& id, std::string& where_to)>;
  explicit load(serve_fn serve) : serve_{std::move(serve)} {
    for (int t = 0; t < 2; ++t) threads_.emplace_back([this, t] { work(t); });
  }
  ~load() { end(); }
  void end() {
    over_ = true;
    for (auto& one : threads_)
      if (one.joinable()) one.join();
  }
  /// Waits until that many requests have gone to the node.
  bool comes_to(const std::string& node, std::size_t count) {
    return comes_true([&] { return served(node) >= count; }, 10ms);
  }
  [[nodiscard]] std::size_t served(const std::string& node) {
    const std::lock_guard lock{mutex_};
    return static_cast<std::size_t>(std::count(nodes_.begin(), nodes_.end(), node));
  }
  [[nodiscard]] std::vector<std::string> failures() {
    const std::lock_guard lock{mutex_};
    return failures_;
  }

 private:
  void work(int thread) {
    for (int i = 0; !over_; ++i) {
      std::string where;
      auto failure = serve_("r" + std::to_string(thread) + "-" + std::to_string(i), where);
      const std::lock_guard lock{mutex_};
      nodes_.push_back(where);
      if (!failure.empty()) failures_.push_back(failure);
    }
  }
  serve_fn serve_;
  std::atomic<bool> over_{false};
  std::mutex mutex_;
  std::vector<std::string> nodes_, failures_;
  std::vector<std::thread> threads_;
};

TEST_F(drained, a_node_leaves_under_load_and_no_request_fails) {
  start();
  load requests{[this](const std::string& id, std::string& to) { return serve(id, to); }};
  ASSERT_TRUE(requests.comes_to("decode-0", 3));
  const auto drain = run({"drain", file_, "decode-0", "--deadline", "1min"});
  EXPECT_EQ(drain.code, 0) << drain.out << drain.err;
  EXPECT_THAT(drain.out, HasSubstr("decode-0 takes no new requests"));
  EXPECT_THAT(drain.out, HasSubstr("decode-0 was drained and has left"));
  const auto before = requests.served("decode-0");
  const auto others = requests.served("decode-1");
  EXPECT_TRUE(requests.comes_to("decode-1", others + 5));
  requests.end();
  EXPECT_EQ(requests.served("decode-0"), before);
  EXPECT_THAT(requests.failures(), IsEmpty());

  const auto gone = node_in(up_->out(), "decode-0");
  EXPECT_TRUE(up_->says("decode-0 (pid " + std::to_string(gone.pid) + ") was drained and has left"))
      << up_->out() << up_->err();
  EXPECT_TRUE(vanishes(gone.pid));
  const auto status = status_of("decode-0");
  EXPECT_EQ(status.at("state"), "down");
  EXPECT_EQ(status.at("reason"), "drained");
  EXPECT_THAT(run({"status", file_}).out, HasSubstr("decode-0 is down: drained"));
  stop();
  EXPECT_THAT(text_of(folder_.path() + "/decode-0.log"),
              HasSubstr("decode-0 was drained and leaves"));
}

TEST_F(drained, a_node_is_leaving_for_as_long_as_a_request_of_its_has_not_ended) {
  start();
  const auto held = place("held");
  ASSERT_TRUE(held) << to_string(held.error());
  const auto name = held->decode.front().name;
  EXPECT_EQ(run({"drain", file_, name, "--no-wait"}).code, 0);
  std::this_thread::sleep_for(1500ms);
  const auto status = status_of(name);
  EXPECT_EQ(status.at("state"), "leaving");
  EXPECT_THAT(status.at("reason"), HasSubstr("1 placed request whose end"));
  const auto again = run({"drain", file_, name});
  EXPECT_EQ(again.code, 1);
  EXPECT_THAT(again.err, HasSubstr("already"));
  ASSERT_TRUE(client_->finished("held"));
  EXPECT_TRUE(up_->says("was drained and has left")) << up_->out() << up_->err();
  stop();
}

TEST_F(drained, a_node_whose_drain_is_cancelled_serves_on) {
  start(2);
  const auto held = place("held");
  ASSERT_TRUE(held) << to_string(held.error());
  const auto replica = held->decode.front().replica;
  const auto rank = [&](int i) {
    return "decode-" + std::to_string(replica) + "-tp" + std::to_string(i);
  };
  command waits{{"drain", file_, rank(0), "--deadline", "10min"}};
  ASSERT_TRUE(waits.says("1 placed request whose end")) << waits.out() << waits.err();
  EXPECT_EQ(status_of(rank(1)).at("state"), "leaving");
  const auto cancel = run({"drain", file_, rank(1), "--cancel"});
  EXPECT_EQ(cancel.code, 0) << cancel.err;
  EXPECT_THAT(cancel.out, HasSubstr(rank(0) + ", " + rank(1) + " take new requests again"));
  EXPECT_EQ(waits.wait(), 1);
  EXPECT_THAT(waits.err(),
              HasSubstr("the drain of " + rank(0) + " was cancelled: it keeps serving"));
  ASSERT_TRUE(client_->finished("held"));
  std::this_thread::sleep_for(1500ms);
  for (int i : {0, 1}) EXPECT_EQ(status_of(rank(i)).at("state"), "up");
  const auto nothing = run({"drain", file_, rank(0), "--cancel"});
  EXPECT_EQ(nothing.code, 1);
  EXPECT_THAT(nothing.err, HasSubstr("it is not being drained"));
  EXPECT_EQ(run({"drain", file_, rank(0), "--cancel", "--no-wait"}).code, 2);
  ASSERT_EQ(run({"drain", file_, rank(0)}).code, 0) << "it can be drained again";
  const auto late = run({"drain", file_, rank(0), "--cancel"});
  EXPECT_EQ(late.code, 1);
  EXPECT_THAT(late.err, HasSubstr("too late to cancel its drain"));
  stop();
}

TEST_F(drained, a_node_leaves_at_the_deadline_although_a_transfer_never_ends) {
  start();
  const auto where = place("endless");
  ASSERT_TRUE(where) << to_string(where.error());
  const auto name = where->decode.front().name;
  auto decoding = decode("endless", *where);  // no node ever prefills it
  ASSERT_TRUE(comes_true([&] { return status_of(name).at("queue_length") != 0; }, 50ms));
  const auto drain = run({"drain", file_, name, "--deadline", "1s"});
  EXPECT_EQ(drain.code, 3) << drain.out << drain.err;
  EXPECT_THAT(drain.err, HasSubstr(name + " is gone, with work unfinished: left when the "
                                          "drain's deadline of 1 s passed: 1 placed request"));
  EXPECT_THAT(drain.err, HasSubstr("1 in its queue"));
  EXPECT_FALSE(decoding.get()) << "it was told that the node is gone";
  EXPECT_TRUE(up_->says("was drained and has left")) << up_->out() << up_->err();
  stop();
}

TEST_F(drained, the_replica_of_a_rank_leaves_as_a_whole) {
  start(2);
  const auto drain = run({"drain", file_, "decode-0-tp1", "--deadline", "1min"});
  EXPECT_EQ(drain.code, 0) << drain.out << drain.err;
  for (const auto* name : {"decode-0-tp0", "decode-0-tp1"}) {
    EXPECT_THAT(drain.out, HasSubstr(std::string{name} + " was drained and has left"));
    EXPECT_TRUE(vanishes(node_in(up_->out(), name).pid)) << name;
  }
  EXPECT_EQ(status_of("decode-1-tp1").at("state"), "up");
  stop();
}

TEST_F(drained, what_cannot_be_drained_is_named) {
  start();
  const auto unknown = run({"drain", file_, "decode-7"});
  EXPECT_EQ(unknown.code, 1);
  EXPECT_THAT(unknown.err, HasSubstr("no node 'decode-7'; it has prefill-0, decode-0, decode-1"));
  const auto supervisor = run({"drain", file_, "supervisor"});
  EXPECT_EQ(supervisor.code, 1);
  EXPECT_THAT(supervisor.err, HasSubstr("is not drained"));
  for (const auto* wrong : {"5", "fast", "25h"}) {
    const auto refused = run({"drain", file_, "decode-0", "--deadline", wrong});
    EXPECT_EQ(refused.code, 2) << wrong;
    EXPECT_THAT(refused.err, HasSubstr("like 30s or 5min")) << wrong;
  }
  EXPECT_THAT(run({"drain", "no-such-file", "decode-0"}).err,
              HasSubstr("troupe drain: no-such-file is neither a deployment file nor HOST:PORT"));
  EXPECT_EQ(status_of("decode-0").at("state"), "up");
  ASSERT_EQ(run({"drain", file_, "decode-0"}).code, 0);
  const auto down = run({"drain", file_, "decode-0"});
  EXPECT_EQ(down.code, 1);
  EXPECT_THAT(down.err, HasSubstr("is down (drained)"));
  stop();
}

TEST(node, that_was_drained_ends_with_zero_and_an_up_of_such_nodes_ends_too) {
  const auto port = free_port();
  const deployment_on_disk file{port};
  command supervisor{{"node", file.path(), "--name", "supervisor"}};
  ASSERT_TRUE(supervisor.says("listens at 127.0.0.1:")) << supervisor.err();
  command cache{{"node", file.path(), "--name", "cache-0"}};
  command stages{{"up", file.path(), "--only", "prefill", "--only", "decode"}};
  ASSERT_TRUE(stages.says("2 nodes are up")) << stages.out() << stages.err();
  ASSERT_TRUE(cache.says("registered with the supervisor")) << cache.err();
  const auto address = "127.0.0.1:" + std::to_string(port);
  for (const auto* name : {"cache-0", "prefill-0", "decode-0"})
    EXPECT_EQ(run({"drain", address, name}).code, 0) << name;
  EXPECT_EQ(cache.wait(), 0) << cache.err();
  EXPECT_THAT(cache.err(), HasSubstr("cache-0 was drained and leaves"));
  EXPECT_EQ(stages.wait(), 0) << stages.err();
  EXPECT_THAT(stages.err(), Not(HasSubstr("stopping the other nodes")));
}

}  // namespace
