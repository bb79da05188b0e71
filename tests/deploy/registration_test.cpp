#include <chrono>
#include <csignal>
#include <thread>

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <sys/stat.h>
#include <unistd.h>

#include "command.hpp"

// A node and its supervisor that do not connect at once, or are separated later.
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;
using ::testing::Not;
using namespace troupe::testing;

command node_of(const deployment_on_disk& file, const std::string& name) {
  return command{{"node", file.path(), "--name", name}};
}

TEST(node, whose_place_another_process_took_meanwhile_ends_with_four_and_says_which) {
  const deployment_on_disk file{free_port(), "reference", "3s"};
  const auto supervisor = node_of(file, "supervisor");
  auto former = node_of(file, "decode-0");
  ASSERT_TRUE(former.says(registered)) << former.err();
  former.signal(SIGSTOP);
  auto successor = node_of(file, "decode-0");
  ASSERT_TRUE(successor.says(registered)) << successor.err();
  former.signal(SIGCONT);
  EXPECT_EQ(former.wait(), 4) << former.err();
  EXPECT_THAT(former.err(), HasSubstr("stale_incarnation"));
  EXPECT_THAT(former.err(), HasSubstr("(pid " + std::to_string(successor.pid()) + ")"));
  // On a busy machine it may be suspect for a moment.
  nlohmann::json shown;
  const auto is_up = [&] {
    const auto status = nlohmann::json::parse(run({"status", file.path(), "--json"}).out);
    for (const auto& node : status.at("nodes")) {
      if (node.at("name") == "decode-0") shown = node;
    }
    return shown.at("state") == "up";
  };
  EXPECT_TRUE(comes_true(is_up, 200ms));
  EXPECT_EQ(shown.at("pid"), successor.pid());
}

TEST(node, whose_former_life_seems_to_live_still_asks_again_until_it_is_taken_in) {
  const deployment_on_disk file{free_port()};
  const auto supervisor = node_of(file, "supervisor");
  auto former = node_of(file, "decode-0");
  ASSERT_TRUE(former.says(registered)) << former.err();
  auto successor = node_of(file, "decode-0");
  ASSERT_TRUE(successor.says("already_exists")) << successor.err();
  EXPECT_THAT(successor.err(), HasSubstr("tries again"));
  former.signal(SIGTERM);
  EXPECT_EQ(former.wait(), 0) << former.err();
  EXPECT_TRUE(successor.says(registered)) << successor.err();
}

TEST(up, a_node_whose_place_another_process_took_is_shown_with_the_reason) {
  const deployment_on_disk file{free_port(), "reference", "3s"};
  command up{{"up", file.path(), "--log-level", "off"}};
  ASSERT_TRUE(up.says("4 nodes are up")) << up.out() << up.err();
  const auto former = node_in(up.out(), "decode-0");
  ASSERT_EQ(::kill(former.pid, SIGSTOP), 0);
  auto successor = node_of(file, "decode-0");
  ASSERT_TRUE(successor.says(registered)) << successor.err();
  ASSERT_EQ(::kill(former.pid, SIGCONT), 0);
  EXPECT_EQ(up.wait(), 1);
  EXPECT_THAT(up.err(), HasSubstr("decode-0 (pid " + std::to_string(former.pid) +
                                  ") ended with exit code 4: stale_incarnation: "));
}

TEST(node, says_at_once_which_supervisor_does_not_answer_and_finds_it_later) {
  const auto port = free_port();
  const deployment_on_disk file{port};
  auto node = node_of(file, "cache-0");
  ASSERT_TRUE(node.says("127.0.0.1:" + std::to_string(port))) << node.err();
  ASSERT_TRUE(node.says("tries again every 200 ms")) << node.err();
  const auto supervisor = node_of(file, "supervisor");
  EXPECT_TRUE(node.says(registered)) << node.err();
}

TEST(node, says_soon_which_supervisor_takes_its_connection_and_is_silent) {
  const taken_port silent;
  const deployment_on_disk file{silent.number()};
  auto node = node_of(file, "cache-0");
  ASSERT_TRUE(node.says("listens at")) << node.err();
  ASSERT_TRUE(node.says("127.0.0.1:" + std::to_string(silent.number()))) << node.err();
  EXPECT_TRUE(node.says("tries again")) << node.err();
}

TEST(up, says_soon_that_nodes_wait_for_a_supervisor_wherever_their_logs_go) {
  const auto port = free_port();
  const deployment_on_disk file{port};
  const scratch_folder folder;
  command up{
      {"up", file.path(), "--only", "cache", "--only", "prefill", "--log-dir", folder.path()}};
  const auto address = "127.0.0.1:" + std::to_string(port);
  ASSERT_TRUE(up.says("wait for the supervisor at " + address)) << up.out() << up.err();
  EXPECT_THAT(up.err(), HasSubstr("prefill-0, cache-0 wait for"));
  EXPECT_THAT(up.out(), Not(HasSubstr("are up")));
  const auto supervisor = node_of(file, "supervisor");
  EXPECT_TRUE(up.says("2 nodes are up")) << up.out() << up.err();
}

TEST(up, says_who_waits_when_the_last_node_listens_and_not_of_some_of_them) {
  const deployment_on_disk file{free_port()};
  const scratch_folder folder;
  // A node whose log is a pipe without a reader blocks when it opens it.
  const auto log = folder.path() + "/cache-0.log";
  ASSERT_EQ(::mkfifo(log.c_str(), 0600), 0);
  command up{
      {"up", file.path(), "--only", "cache", "--only", "prefill", "--log-dir", folder.path()}};
  ASSERT_TRUE(up.says("prefill-0 (pid")) << up.out() << up.err();
  EXPECT_FALSE(up.says_within(4s, "wait")) << up.err();
  const int reader = ::open(log.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  EXPECT_TRUE(up.says("prefill-0, cache-0 wait for the supervisor")) << up.out() << up.err();
  up.signal(SIGTERM);
  EXPECT_EQ(up.wait(), 0) << up.err();
  ::close(reader);
}

TEST(up, says_nothing_of_waiting_when_nobody_waits) {
  const deployment_on_disk file{free_port()};
  command up{{"up", file.path()}};
  ASSERT_TRUE(up.says("4 nodes are up")) << up.out() << up.err();
  EXPECT_FALSE(up.says_within(4s, "wait")) << up.err();
}

}  // namespace
