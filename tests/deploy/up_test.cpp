#include <chrono>
#include <csignal>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "command.hpp"

namespace {

using ::testing::HasSubstr;
using namespace troupe::testing;

void expect_nothing_left(const std::string& output) {
  for (const auto& node : nodes_in(output)) {
    EXPECT_TRUE(vanishes(node.pid)) << node.name;
    EXPECT_TRUE(falls_silent(node.port)) << node.name;
  }
}

TEST(up, starts_every_node_and_ctrl_c_stops_them_all_and_leaves_nothing) {
  const deployment_on_disk file{free_port()};
  command up{{"up", file.path()}};
  ASSERT_TRUE(up.says("4 nodes are up")) << up.out() << up.err();
  const auto nodes = nodes_in(up.out());
  ASSERT_EQ(nodes.size(), 4u) << up.out();
  for (const auto& node : nodes) EXPECT_TRUE(listens(node.port)) << node.name;
  up.signal(SIGINT);
  EXPECT_EQ(up.wait(), 0) << up.err();
  EXPECT_THAT(up.out(), HasSubstr("all nodes stopped"));
  expect_nothing_left(up.out());
}

TEST(up, takes_two_signals_in_a_row_for_one) {
  const deployment_on_disk file{free_port()};
  command up{{"up", file.path()}};
  ASSERT_TRUE(up.says("4 nodes are up")) << up.out() << up.err();
  up.signal(SIGTERM);
  std::this_thread::sleep_for(std::chrono::milliseconds{5});
  up.signal(SIGTERM);
  EXPECT_EQ(up.wait(), 0) << up.err();
  EXPECT_THAT(up.out(), HasSubstr("all nodes stopped"));
  expect_nothing_left(up.out());
}

TEST(up, the_same_port_can_be_used_again_at_once) {
  const deployment_on_disk file{free_port()};
  for (int life = 0; life < 2; ++life) {
    command up{{"up", file.path()}};
    ASSERT_TRUE(up.says("4 nodes are up")) << up.out() << up.err();
    up.signal(SIGTERM);
    ASSERT_EQ(up.wait(), 0) << up.err();
  }
}

TEST(up, a_supervisor_that_listens_anywhere_is_found_by_its_own_nodes) {
  const deployment_on_disk file{0};
  command up{{"up", file.path()}};
  ASSERT_TRUE(up.says("4 nodes are up")) << up.out() << up.err();
  const auto port = node_in(up.out(), "supervisor").port;
  EXPECT_EQ(run_until_good({"status", "127.0.0.1:" + std::to_string(port)}).code, 0);
}

TEST(up, a_taken_port_fails_at_once_and_is_named) {
  const taken_port taken;
  const deployment_on_disk file{taken.number()};
  command up{{"up", file.path()}};
  EXPECT_EQ(up.wait(), 1);
  EXPECT_THAT(up.err(), HasSubstr("supervisor"));
  EXPECT_THAT(up.err(), HasSubstr("already_exists"));
  EXPECT_THAT(up.err(), HasSubstr(std::to_string(taken.number())));
  EXPECT_THAT(up.out(), ::testing::Not(HasSubstr("prefill-0")));
}

class victim : public ::testing::TestWithParam<std::string> {};

TEST_P(victim, that_is_killed_is_reported_and_takes_the_others_down_in_good_order) {
  const deployment_on_disk file{free_port()};
  command up{{"up", file.path()}};
  ASSERT_TRUE(up.says("4 nodes are up")) << up.out() << up.err();
  const auto dead = node_in(up.out(), GetParam());
  ASSERT_GT(dead.pid, 0);
  ASSERT_EQ(::kill(dead.pid, SIGKILL), 0);
  EXPECT_EQ(up.wait(), 1);
  EXPECT_THAT(up.err(), HasSubstr(GetParam() + " (pid " + std::to_string(dead.pid) +
                                  ") ended with signal 9; stopping the other nodes"));
  EXPECT_THAT(up.out(), HasSubstr("all nodes stopped"));
  expect_nothing_left(up.out());
}

INSTANTIATE_TEST_SUITE_P(up, victim, ::testing::Values("supervisor", "prefill-0", "cache-0"),
                         [](const auto& tested) {
                           return tested.param.substr(0, tested.param.find('-'));
                         });

TEST(up, nodes_do_not_outlive_a_killed_up) {
  const deployment_on_disk file{free_port()};
  command up{{"up", file.path()}};
  ASSERT_TRUE(up.says("4 nodes are up")) << up.out() << up.err();
  up.signal(SIGKILL);
  EXPECT_EQ(up.wait(), 128 + SIGKILL);
  expect_nothing_left(up.out());
}

TEST(ask, prints_what_a_running_cluster_writes_as_it_is_written) {
  const auto port = free_port();
  const deployment_on_disk file{port};
  command up{{"up", file.path(), "--log-level", "error"}};
  ASSERT_TRUE(up.says("4 nodes are up")) << up.out() << up.err();
  const auto asks = [](const std::string& where, const std::string& seed) {
    return run({"ask", where, "--prompt", "to be", "--max-tokens", "24", "--seed", seed});
  };
  const auto once = asks(file.path(), "7");
  ASSERT_EQ(once.code, 0) << once.err;
  EXPECT_GT(once.out.size(), 10U) << once.out;
  EXPECT_EQ(asks("127.0.0.1:" + std::to_string(port), "7").out, once.out);
  EXPECT_NE(asks(file.path(), "8").out, once.out);
  // A long text is shown before it is complete, and is given up on a signal.
  command long_text{
      {"ask", file.path(), "--prompt", "to be", "--max-tokens", "4000", "--seed", "7"}};
  ASSERT_TRUE(long_text.says(once.out.substr(0, 10))) << long_text.err();
  long_text.signal(SIGINT);
  EXPECT_EQ(long_text.wait(), 130) << long_text.err();
  EXPECT_LT(long_text.out().size(), 4000U);
  // Without a decode node there is no text, and the command says so.
  ASSERT_EQ(::kill(node_in(up.out(), "decode-0").pid, SIGSTOP), 0);
  const auto late = run({"ask", file.path(), "--prompt", "to be", "--deadline", "2"});
  EXPECT_EQ(late.code, 1);
  EXPECT_THAT(late.err, HasSubstr("troupe ask: "));
  ASSERT_EQ(::kill(node_in(up.out(), "decode-0").pid, SIGCONT), 0);
}

TEST(up, starts_only_what_it_is_told_to) {
  const deployment_on_disk file{free_port()};
  // The file may come last: --only takes one value.
  command up{{"up", "--only", "supervisor", "--only", "cache", file.path()}};
  ASSERT_TRUE(up.says("2 nodes are up")) << up.out() << up.err();
  EXPECT_GT(node_in(up.out(), "cache-0").pid, 0);
  EXPECT_EQ(node_in(up.out(), "prefill-0").pid, -1);
}

TEST(up, a_name_that_is_no_node_ends_with_two_and_the_names_there_are) {
  const deployment_on_disk file{free_port()};
  const auto ended = run({"up", file.path(), "--only", "prefil-0"});
  EXPECT_EQ(ended.code, 2);
  EXPECT_THAT(ended.err, HasSubstr("`prefil-0` is neither a node nor a stage"));
  EXPECT_THAT(ended.err, HasSubstr("supervisor, prefill-0, decode-0, cache-0"));
  const auto none = run({"up", file.path(), "--only", ""});
  EXPECT_EQ(none.code, 2) << "the supervisor is of no stage, which is no name";
  EXPECT_THAT(none.err, HasSubstr("`` is neither a node nor a stage"));
}

/// A deployment whose nodes all join by themselves.
std::string open_to_all() {
  return "cluster: open-test\n"
         "supervisor: {host: 127.0.0.1, port: " +
         std::to_string(free_port()) +
         ", state_file: none}\n"
         "stages:\n  - {name: engines, role: both, open: {}}\n"
         "edges:\n  - {from: engines, to: engines, mode: read}\n";
}

TEST(up, starts_the_supervisor_of_an_open_stage_and_leaves_the_nodes_to_join) {
  const deployment_on_disk file{open_to_all()};
  command up{{"up", file.path()}};
  ASSERT_TRUE(up.says("1 node is up")) << up.out() << up.err();
  EXPECT_THAT(up.out(), HasSubstr("stage engines is open: its nodes join by themselves\n"));
  EXPECT_EQ(run_until_good({"status", file.path()}).code, 0) << "no node is missing";
}

TEST(up, does_not_wait_for_an_open_stage_that_it_is_told_to_start) {
  const deployment_on_disk file{open_to_all()};
  const auto ended = run({"up", file.path(), "--only", "supervisor", "--only", "engines"});
  EXPECT_EQ(ended.code, 2);
  EXPECT_THAT(ended.err, HasSubstr("--only `engines` is an open stage"));
  EXPECT_EQ(ended.out, "");
}

TEST(up, a_port_that_nobody_knows_is_refused_without_the_supervisor) {
  const deployment_on_disk file{0};
  const auto ended = run({"up", file.path(), "--only", "prefill"});
  EXPECT_EQ(ended.code, 2);
  EXPECT_THAT(ended.err, HasSubstr("supervisor.port is 0"));
}

TEST(node, runs_until_it_is_told_to_stop) {
  const deployment_on_disk file{free_port()};
  command node{{"node", file.path(), "--name", "supervisor"}};
  ASSERT_TRUE(node.says("listens at 127.0.0.1:")) << node.err();
  node.signal(SIGTERM);
  EXPECT_EQ(node.wait(), 0) << node.err();
}

TEST(node, stops_although_it_never_found_its_supervisor) {
  const deployment_on_disk file{free_port()};
  command node{{"node", file.path(), "--name", "decode-0"}};
  ASSERT_TRUE(node.says("not registered")) << node.err();
  node.signal(SIGINT);
  EXPECT_EQ(node.wait(), 0) << node.err();
}

TEST(node, an_external_engine_is_refused_with_how_to_embed_it) {
  const deployment_on_disk file{free_port(), "external"};
  const auto ended = run({"node", file.path(), "--name", "decode-0"});
  EXPECT_EQ(ended.code, 2);
  EXPECT_THAT(ended.err, HasSubstr("engine: external"));
  EXPECT_THAT(ended.err, HasSubstr("troupe::engine::start"));
}

TEST(up, leaves_external_engines_to_their_owner_and_says_so) {
  const deployment_on_disk file{free_port(), "external"};
  command up{{"up", file.path()}};
  ASSERT_TRUE(up.says("3 nodes are up")) << up.out() << up.err();
  EXPECT_THAT(up.out(), HasSubstr("decode-0 has `engine: external`: start it yourself"));
}

TEST(node, an_unknown_name_ends_with_two_and_the_names_there_are) {
  const deployment_on_disk file{free_port()};
  const auto ended = run({"node", file.path(), "--name", "decode-7"});
  EXPECT_EQ(ended.code, 2);
  EXPECT_THAT(ended.err, HasSubstr("supervisor, prefill-0, decode-0, cache-0"));
}

}  // namespace
