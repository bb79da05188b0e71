#include <atomic>
#include <chrono>
#include <csignal>
#include <fstream>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include <caf/exit_reason.hpp>
#include <caf/send.hpp>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "troupe/actors/cluster_client.hpp"
#include "troupe/actors/messages/messages.hpp"
#include "troupe/actors/runtime/system.hpp"
#include "troupe/deploy/reference_engine/calls.hpp"

#include "command.hpp"

// `troupe up` with `restart: on-failure`: real processes that are killed, cannot start, or leave.
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;
using ::testing::Not;
using namespace troupe::testing;
namespace actors = troupe::actors;
namespace reference = troupe::reference;

/// A prefill, a decode and a store that are started again. A silent node is `down` only after
/// longer than any test waits.
std::string deployment(std::uint16_t supervisor, std::uint16_t decode) {
  return "cluster: restart-test\n"
         "supervisor: {host: 127.0.0.1, port: " +
         std::to_string(supervisor) +
         ", heartbeat_interval: 200ms, heartbeat_timeout: 10min}\n"
         "security: {mode: none}\n"
         "model: {layers: 2, kv_heads: 2, head_dim: 16, dtype: bf16, block_tokens: 16}\n"
         "stages:\n"
         "  - {name: prefill, role: prefill, restart: on-failure, pool: {size: 1MiB}}\n"
         "  - {name: decode, role: decode, restart: on-failure, pool: {size: 1MiB}, port: " +
         std::to_string(decode) +
         "}\n"
         "  - {name: cache, role: store, restart: on-failure, pool: {size: 1MiB}}\n"
         "edges:\n"
         "  - {from: prefill, to: decode, mode: write}\n"
         "limits: {transfer_deadline: 5s}\n";
}

std::size_t times(const std::string& part, const std::string& text) {
  std::size_t count = 0;
  for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

void expect_nothing_left(const command& up) {
  for (const auto& node : nodes_in(up.out())) {
    EXPECT_TRUE(vanishes(node.pid)) << node.name;
    EXPECT_TRUE(falls_silent(node.port)) << node.name;
  }
}

/// Sends prompts through a cluster, as a frontend does.
class frontend {
 public:
  explicit frontend(std::uint16_t supervisor) {
    actors::cluster_client_options options;
    options.port = supervisor;
    if (auto made = actors::cluster_client::connect(options)) client_ = std::move(*made);
  }
  /// Returns the text of a prompt by way of a transfer, or an error.
  troupe::result<reference::generation> ask() {
    if (!client_) return troupe::fail(troupe::errc::peer_unreachable, "no supervisor");
    actors::placement_request wanted;
    wanted.request = "r" + std::to_string(++requests_);
    wanted.from = "prefill";
    wanted.to = "decode";
    wanted.timeout_ms = 2000;
    const auto where = client_->place(wanted);
    if (!where) return troupe::fail(where.error());
    reference::prefill_call prefill;
    prefill.request = wanted.request;
    prefill.prompt = reference::encode_text("to be or not to be");
    prefill.deadline_ms = 5000;
    reference::decode_call decode;
    decode.request = wanted.request;
    decode.sources = {where->prefill.front().name};
    decode.replica = {where->decode.front().name};
    decode.prompt = prefill.prompt;
    decode.max_tokens = 4;
    decode.deadline_ms = 5000;
    auto first = std::async(std::launch::async, [&] {
      return call(where->prefill.front(), "prefill", reference::to_json(prefill));
    });
    const auto text = call(where->decode.front(), "decode", reference::to_json(decode));
    if (!text)
      (void)call(where->prefill.front(), "abort", reference::abort_to_json(wanted.request));
    const auto filled = first.get();
    (void)client_->finished(wanted.request);
    if (!text) return troupe::fail(text.error());
    if (!filled) return troupe::fail(filled.error());
    auto reply = reference::decode_reply_from(*text);
    if (!reply) return troupe::fail(reply.error());
    return std::move(reply->text);
  }

 private:
  troupe::result<reference::payload> call(const actors::node_info& node, const std::string& method,
                                          reference::payload payload) {
    actors::call_request request;
    request.method = method;
    request.payload = std::move(payload);
    request.timeout_ms = 8000;
    return client_->call(node, request);
  }
  std::unique_ptr<actors::cluster_client> client_;
  int requests_{0};
};

/// Asks until a text comes.
troupe::result<reference::generation> ask_until_good(frontend& who) {
  auto text = who.ask();
  (void)comes_true([&] { return text || (text = who.ask()); });
  return text;
}

class killed : public ::testing::TestWithParam<std::string> {};

TEST_P(killed, node_under_load_is_back_at_once_and_serves_again) {
  const auto port = free_port();
  const deployment_on_disk file{deployment(port, free_port())};
  command up{{"up", file.path(), "--log-level", "warn"}};
  ASSERT_TRUE(up.says("4 nodes are up")) << up.out() << up.err();
  frontend users{port};
  const auto before = ask_until_good(users);
  ASSERT_TRUE(before) << to_string(before.error());
  const auto dead = node_in(up.out(), GetParam());
  std::atomic<bool> over{false};
  // Requests may succeed or fail, but all of them end.
  auto load = std::async(std::launch::async, [&] {
    while (!over) (void)users.ask();
  });
  std::this_thread::sleep_for(50ms);
  EXPECT_EQ(::kill(dead.pid, SIGKILL), 0);
  const bool back = up.says("is up again");
  over = true;
  load.get();
  ASSERT_TRUE(back) << up.out() << up.err();
  EXPECT_THAT(up.err(), HasSubstr(GetParam() + " (pid " + std::to_string(dead.pid) +
                                  ") ended with signal 9; starting it again in 100 ms (restart 1 "
                                  "of at most 5 within 60 s)"));
  EXPECT_THAT(up.err(), Not(HasSubstr("already_exists"))) << "its former life seemed to live";
  const auto alive = node_in(up.out(), GetParam());
  EXPECT_NE(alive.pid, dead.pid);
  if (GetParam() == "decode-0") {
    EXPECT_EQ(alive.port, dead.port) << "which the file fixes";
  }
  const auto after = ask_until_good(users);
  ASSERT_TRUE(after) << to_string(after.error());
  EXPECT_EQ(*after, *before);
  EXPECT_EQ(run_until_good({"status", file.path()}).code, 0);
  up.signal(SIGTERM);
  EXPECT_EQ(up.wait(), 0) << up.err();
  expect_nothing_left(up);
}

INSTANTIATE_TEST_SUITE_P(up, killed, ::testing::Values("decode-0", "prefill-0"),
                         [](const auto& tested) {
                           return tested.param.substr(0, tested.param.find('-'));
                         });

class crashed : public ::testing::TestWithParam<std::string> {};

TEST_P(crashed, node_says_what_crashed_in_it_and_is_started_again) {
  const auto port = free_port();
  const deployment_on_disk file{deployment(port, 0)};
  command up{{"up", file.path(), "--log-level", "error"}};
  ASSERT_TRUE(up.says("4 nodes are up")) << up.out() << up.err();
  const auto before = node_in(up.out(), GetParam());
  frontend users{port};
  ASSERT_TRUE(ask_until_good(users)) << "links are there that nobody closes any more";
  {
    // Stands for an exception in a handler of the node's actor.
    actors::actor_host stranger;
    const auto node = stranger.connect<actors::node_actor>("127.0.0.1", before.port, wait_limit);
    ASSERT_TRUE(node) << to_string(node.error());
    caf::anon_send_exit(*node, caf::exit_reason::unhandled_exception);
    ASSERT_TRUE(up.says("is up again")) << up.out() << up.err();
  }
  EXPECT_THAT(up.err(),
              HasSubstr(GetParam() + " (pid " + std::to_string(before.pid) +
                        ") ended with exit code 1: internal: the actor of the node crashed"));
  EXPECT_NE(node_in(up.out(), GetParam()).pid, before.pid);
  EXPECT_EQ(run_until_good({"status", file.path()}).code, 0);
}

INSTANTIATE_TEST_SUITE_P(up, crashed, ::testing::Values("decode-0", "cache-0"),
                         [](const auto& tested) {
                           return tested.param.substr(0, tested.param.find('-'));
                         });

TEST(up, a_killed_supervisor_is_back_where_its_nodes_look_for_it) {
  const deployment_on_disk file{deployment(0, 0)};
  command up{{"up", file.path(), "--log-level", "error"}};
  ASSERT_TRUE(up.says("4 nodes are up")) << up.out() << up.err();
  const auto dead = node_in(up.out(), "supervisor");
  const auto others = node_in(up.out(), "cache-0");
  ASSERT_EQ(::kill(dead.pid, SIGKILL), 0);
  ASSERT_TRUE(up.says("is up again")) << up.out() << up.err();
  EXPECT_NE(node_in(up.out(), "supervisor").pid, dead.pid);
  EXPECT_EQ(node_in(up.out(), "supervisor").port, dead.port);
  EXPECT_EQ(node_in(up.out(), "cache-0").pid, others.pid) << "it has no part in this";
  const auto status = run_until_good({"status", "127.0.0.1:" + std::to_string(dead.port)});
  EXPECT_EQ(status.code, 0) << status.out << status.err;
}

TEST(up, keeps_its_nodes_where_the_supervisor_cannot_be_kept_running_and_tries_it_again) {
  const auto yaml = deployment(free_port(), 0);
  const deployment_on_disk file{yaml};
  command up{{"up", file.path(), "--log-level", "off"}};
  ASSERT_TRUE(up.says("4 nodes are up")) << up.out() << up.err();
  const auto dead = node_in(up.out(), "supervisor");
  const auto cache = node_in(up.out(), "cache-0");
  std::ofstream{file.path()} << "cluster: [";
  ASSERT_EQ(::kill(dead.pid, SIGKILL), 0);
  ASSERT_TRUE(up.says("the other nodes continue without it, and it is tried again in 10"))
      << up.err();
  EXPECT_THAT(up.err(), HasSubstr("supervisor (pid"));
  EXPECT_EQ(::kill(cache.pid, 0), 0);
  std::ofstream{file.path()} << yaml;
  ASSERT_TRUE(up.says("is up again")) << up.out() << up.err();
  EXPECT_EQ(node_in(up.out(), "cache-0").pid, cache.pid) << "it has no part in this";
  up.signal(SIGTERM);
  EXPECT_EQ(up.wait(), 0) << up.err();
  expect_nothing_left(up);
}

TEST(up, gives_a_node_up_that_keeps_ending_and_stops_the_others) {
  const taken_port taken;
  const deployment_on_disk file{deployment(free_port(), taken.number())};
  command up{{"up", file.path(), "--log-level", "off"}};
  EXPECT_EQ(up.wait(), 1);
  for (const auto* delay : {"100 ms (restart 1", "200 ms (restart 2", "400 ms (restart 3",
                            "800 ms (restart 4", "1600 ms (restart 5"})
    EXPECT_THAT(up.err(), HasSubstr(std::string{"starting it again in "} + delay));
  EXPECT_EQ(times("is started again", up.err()), 5u) << up.err();
  EXPECT_THAT(up.err(), HasSubstr("given up after 5 restarts within 60 s; stopping the other"));
  EXPECT_THAT(up.err(), HasSubstr("already_exists")) << "the reason";
  EXPECT_THAT(up.out(), HasSubstr("all nodes stopped"));
  expect_nothing_left(up);
}

TEST(up, that_is_stopped_while_a_node_waits_for_its_next_start_does_not_wait_for_that) {
  const taken_port taken;
  const deployment_on_disk file{deployment(free_port(), taken.number())};
  command up{{"up", file.path(), "--log-level", "off"}};
  ASSERT_TRUE(up.says("1600 ms (restart 5 of")) << up.out() << up.err();
  up.signal(SIGTERM);
  EXPECT_EQ(up.wait(), 0) << up.err();
  EXPECT_EQ(times("is started again", up.err()), 4u) << up.err();
  EXPECT_THAT(up.out(), HasSubstr("all nodes stopped"));
  expect_nothing_left(up);
}

TEST(up, does_not_start_a_node_again_that_left_in_good_order_and_goes_on_without_it) {
  const deployment_on_disk file{deployment(free_port(), 0)};
  command up{{"up", file.path(), "--log-level", "warn"}};
  ASSERT_TRUE(up.says("4 nodes are up")) << up.out() << up.err();
  ASSERT_EQ(::kill(node_in(up.out(), "cache-0").pid, SIGTERM), 0);
  ASSERT_TRUE(up.says("ended with exit code 0; it has left and is not started again")) << up.err();
  EXPECT_FALSE(up.says_within(4s, "is started again")) << up.err();
  EXPECT_EQ(::kill(node_in(up.out(), "decode-0").pid, 0), 0);
  up.signal(SIGTERM);
  EXPECT_EQ(up.wait(), 0) << up.err();
  expect_nothing_left(up);
}

TEST(up, ends_well_when_every_node_of_it_has_left) {
  const deployment_on_disk file{deployment(free_port(), 0)};
  command supervisor{{"node", file.path(), "--name", "supervisor"}};
  ASSERT_TRUE(supervisor.says("listens at")) << supervisor.err();
  command up{{"up", file.path(), "--only", "cache"}};
  ASSERT_TRUE(up.says("1 node is up")) << up.out() << up.err();
  ASSERT_EQ(::kill(node_in(up.out(), "cache-0").pid, SIGTERM), 0);
  EXPECT_EQ(up.wait(), 0) << up.err();
  EXPECT_THAT(up.out(), HasSubstr("every node has left"));
}

TEST(up, does_not_start_a_node_again_whose_file_is_not_valid_any_more) {
  const deployment_on_disk file{deployment(free_port(), 0)};
  command up{{"up", file.path(), "--log-level", "warn"}};
  ASSERT_TRUE(up.says("4 nodes are up")) << up.out() << up.err();
  std::ofstream{file.path()} << "cluster: [";
  ASSERT_EQ(::kill(node_in(up.out(), "cache-0").pid, SIGKILL), 0);
  EXPECT_EQ(up.wait(), 1);
  EXPECT_THAT(up.err(), HasSubstr("ended with exit code 2; starting it again would not help"));
  EXPECT_EQ(times("is started again", up.err()), 1u);
}

TEST(up, does_not_start_a_node_again_whose_place_another_process_took) {
  const auto port = free_port();
  auto yaml = deployment(port, 0);
  yaml.replace(yaml.find("10min"), 5, "3s");
  const deployment_on_disk file{yaml};
  command up{{"up", file.path(), "--log-level", "off"}};
  ASSERT_TRUE(up.says("4 nodes are up")) << up.out() << up.err();
  const auto former = node_in(up.out(), "decode-0");
  ASSERT_EQ(::kill(former.pid, SIGSTOP), 0);
  command successor{{"node", file.path(), "--name", "decode-0"}};
  ASSERT_TRUE(successor.says("registered with the supervisor as")) << successor.err();
  ASSERT_EQ(::kill(former.pid, SIGCONT), 0);
  EXPECT_EQ(up.wait(), 1);
  EXPECT_THAT(up.err(), HasSubstr("ended with exit code 4: stale_incarnation: "));
  EXPECT_THAT(up.err(), HasSubstr("starting it again would not help"));
  EXPECT_EQ(times("is started again", up.err()), 0u);
}

}  // namespace
