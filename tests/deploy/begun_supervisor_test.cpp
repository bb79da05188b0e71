// A supervisor that no operator starts, with the real command: nodes begin it, find it, lose it and
// begin the next one. It ends by itself, and not with the process that began it.

#include "begun_supervisor.hpp"

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <poll.h>
#include <sched.h>
#include <unistd.h>

#include "command.hpp"
#include "process_tree.hpp"
#include "text_of.hpp"

namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;
using ::testing::Not;
using namespace troupe::testing;
namespace fs = std::filesystem;

/// How often `text` occurs in `all`.
std::size_t count_in(const std::string& all, const std::string& text) {
  std::size_t count = 0;
  for (auto at = all.find(text); at != std::string::npos; at = all.find(text, at + 1)) ++count;
  return count;
}

/// Whether the process has ended; a zombie has.
bool is_over(pid_t pid) {
  const auto state = standing_of(std::to_string(pid)).state;
  return state == 0 || state == 'Z';
}

class begun : public ::testing::Test {
 protected:
  /// Each test has a cluster, and so a supervisor, of its own.
  static std::string next_cluster() {
    static int count = 0;
    return "begun-" + std::to_string(::getpid()) + "-" + std::to_string(++count);
  }
  [[nodiscard]] std::string text(const std::string& more = "port: 0",
                                 const std::string& hosts = "127.0.0.1") const {
    return "cluster: " + cluster + "\nsupervisor: {begin: true, " + more +
           ", heartbeat_interval: 200ms, heartbeat_timeout: 10min, state_file: none}\n"
           "stages:\n  - {name: cache, role: store, replicas: 2, hosts: [" +
           hosts + "], pool: {size: 1MiB}}\n";
  }
  void describe(const std::string& yaml) { file = std::make_unique<deployment_on_disk>(yaml); }
  [[nodiscard]] std::unique_ptr<command> launch(const std::string& name) const {
    return std::make_unique<command>(
        std::vector<std::string>{"node", file->path(), "--name", name});
  }
  /// Waits for another registration after the first `before` ones.
  static bool registers(command& node, std::size_t before = 0) {
    return node.reads_until([&] { return count_in(node.err(), registered) > before; });
  }
  [[nodiscard]] static std::string arguments_of(pid_t pid) {
    auto all = text_of("/proc/" + std::to_string(pid) + "/cmdline");
    std::ranges::replace(all, '\0', ' ');
    return all;
  }

  std::string cluster{next_cluster()};
  begun_supervisor supervisor{cluster};  // ends after everything that could begin another
  std::unique_ptr<deployment_on_disk> file{std::make_unique<deployment_on_disk>(text())};
};

TEST_F(begun, by_a_node_that_finds_none_and_found_by_the_next_and_by_the_other_verbs) {
  const auto none = run({"status", file->path()});
  EXPECT_EQ(none.code, 1);
  EXPECT_THAT(none.err, HasSubstr("not_found: no supervisor: no supervisor of cluster " + cluster));
  EXPECT_THAT(none.err, HasSubstr("begins it"));
  EXPECT_FALSE(supervisor.lives()) << "whoever only looks begins none";

  auto first = launch("cache-0");
  ASSERT_TRUE(registers(*first)) << first->err();
  const auto pid = supervisor.wait();
  ASSERT_GT(pid, 0) << supervisor.log();
  EXPECT_THAT(arguments_of(pid), HasSubstr("troupe node " + supervisor.folder() +
                                           "/supervisor.yaml --name supervisor --detach"));
  auto second = launch("cache-1");
  ASSERT_TRUE(registers(*second)) << second->err();
  EXPECT_EQ(supervisor.pid(), pid);
  EXPECT_EQ(count_in(supervisor.log(), "listens at"), 1u) << supervisor.log();

  const auto status = run_until_good({"status", file->path(), "--json"});
  ASSERT_EQ(status.code, 0) << status.err;
  const auto nodes = nlohmann::json::parse(status.out).at("nodes");
  EXPECT_EQ(nodes.size(), 2u);
  const auto notice = nlohmann::json::parse(supervisor.notice());
  EXPECT_EQ(notice.at("host"), "127.0.0.1");
  EXPECT_EQ(run({"events", file->path(), "--json"}).code, 0);

  const auto by_hand = run({"node", file->path(), "--name", "supervisor"});
  EXPECT_EQ(by_hand.code, 2);
  EXPECT_THAT(by_hand.err, HasSubstr("already_exists"));
  EXPECT_THAT(by_hand.err, HasSubstr("the process of pid " + std::to_string(pid)));
}

TEST_F(begun, once_by_all_that_start_at_the_same_time) {
  std::vector<std::unique_ptr<command>> all;
  for (const auto* name : {"cache-0", "cache-1"}) all.push_back(launch(name));
  for (int i = 0; i < 4; ++i) {
    all.push_back(std::make_unique<command>(
        std::vector<std::string>{"node", file->path(), "--stage", "cache"}));
  }
  for (std::size_t i = 0; i < 2; ++i) ASSERT_TRUE(registers(*all[i])) << all[i]->err();
  EXPECT_GT(supervisor.wait(), 0);
  EXPECT_EQ(count_in(supervisor.log(), "listens at"), 1u) << supervisor.log();
  EXPECT_EQ(count_in(supervisor.log(), "already_exists"), 0u) << supervisor.log();
}

TEST_F(begun, by_a_process_that_is_started_for_a_stage) {
  describe(
      "cluster: " + cluster +
      "\nsupervisor: {begin: true, port: 0, heartbeat_interval: 200ms, heartbeat_timeout: 2s}\n"
      "stages:\n  - {name: cache, role: store, pool: {size: 1MiB}}\n");
  command node{{"node", file->path(), "--stage", "cache"}};
  ASSERT_TRUE(registers(node)) << node.err();
  EXPECT_THAT(node.err(), HasSubstr("the supervisor assigned the name cache-0"));
  EXPECT_GT(supervisor.wait(), 0);
}

/// No name is given before nodes of a former supervisor have had time to register, which takes
/// longer than an idle supervisor may live here.
TEST_F(begun, for_a_process_that_asks_for_a_name_and_stays_until_that_has_one) {
  describe("cluster: " + cluster +
           "\nsupervisor: {begin: true, port: 0, idle: 1s, heartbeat_interval: 200ms, "
           "heartbeat_timeout: 6s, state_file: none}\n"
           "stages:\n  - {name: cache, role: store, pool: {size: 1MiB}}\n");
  command node{{"node", file->path(), "--stage", "cache"}};
  ASSERT_TRUE(registers(node)) << node.err() << supervisor.log();
  EXPECT_THAT(node.err(), HasSubstr("it gives names in"));
  EXPECT_GT(supervisor.wait(), 0);
}

TEST_F(begun, and_ends_where_its_notice_is_gone_and_its_nodes_go_to_the_next) {
  auto node = launch("cache-0");
  ASSERT_TRUE(registers(*node)) << node->err();
  const auto pid = supervisor.wait();
  ASSERT_GT(pid, 0) << supervisor.log();
  fs::remove(supervisor.folder() + "/supervisor");
  EXPECT_TRUE(registers(*node, 1)) << node->err() << supervisor.log();
  EXPECT_GT(supervisor.wait(pid), 0) << supervisor.log();
  EXPECT_TRUE(comes_true([&] { return is_over(pid); }, 10ms));
  EXPECT_THAT(supervisor.log(), HasSubstr("was removed or replaced"));
}

TEST_F(begun, anew_when_it_is_killed_and_its_nodes_register_with_the_next) {
  auto first = launch("cache-0");
  auto second = launch("cache-1");
  ASSERT_TRUE(registers(*first)) << first->err();
  ASSERT_TRUE(registers(*second)) << second->err();
  auto pid = supervisor.wait();
  for (std::size_t life = 1; life <= 2; ++life) {
    ASSERT_GT(pid, 0) << supervisor.log();
    ASSERT_EQ(::kill(pid, SIGKILL), 0);
    const auto next = supervisor.wait(pid);
    ASSERT_GT(next, 0) << supervisor.log() << first->err();
    EXPECT_TRUE(registers(*first, life)) << first->err();
    EXPECT_TRUE(registers(*second, life)) << second->err();
    pid = next;
  }
  EXPECT_EQ(supervisor.pid(), pid);
  EXPECT_EQ(run_until_good({"status", file->path()}).code, 0);
  for (auto* node : {first.get(), second.get()}) {
    node->signal(SIGTERM);
    EXPECT_EQ(node->wait(), 0) << node->err();
  }
}

TEST_F(begun, stays_while_there_is_a_node_and_ends_by_itself_after_its_time_without_one) {
  describe(text("port: 0, idle: 4s"));
  auto node = launch("cache-0");
  ASSERT_TRUE(registers(*node)) << node->err();
  const auto pid = supervisor.wait();
  ASSERT_GT(pid, 0) << supervisor.log();
  EXPECT_EQ(node->wait_for(9s), -1) << node->err();
  EXPECT_TRUE(supervisor.lives()) << supervisor.log();
  EXPECT_EQ(supervisor.pid(), pid);
  node->signal(SIGTERM);
  EXPECT_EQ(node->wait(), 0) << node->err();
  EXPECT_TRUE(comes_true([&] { return !supervisor.lives(); }, 10ms)) << supervisor.log();
  EXPECT_EQ(supervisor.notice(), "");
  EXPECT_TRUE(comes_true([&] { return is_over(pid); }, 10ms));
  EXPECT_THAT(supervisor.log(), HasSubstr("no node was there for 4s (supervisor.idle)"));
  EXPECT_THAT(supervisor.log(), HasSubstr("supervisor stopped"));
  auto again = launch("cache-0");
  ASSERT_TRUE(registers(*again)) << again->err();
  EXPECT_GT(supervisor.wait(pid), 0) << "the next one is begun";
}

TEST_F(begun, at_a_port_of_the_file_that_is_free_again_when_the_next_is_begun) {
  const auto port = free_port();
  describe(text("port: " + std::to_string(port) + ", idle: 4s"));
  for (int life = 0; life < 2; ++life) {
    auto node = launch("cache-0");
    ASSERT_TRUE(registers(*node)) << node->err() << supervisor.log();
    EXPECT_EQ(nlohmann::json::parse(supervisor.notice()).at("port"), port);
    node->signal(SIGTERM);
    EXPECT_EQ(node->wait(), 0) << node->err();
    // Once its notice is gone, the process ends soon; a node that looks meanwhile waits for that.
    EXPECT_TRUE(comes_true([&] { return supervisor.notice().empty(); })) << supervisor.log();
  }
}

TEST_F(begun, survives_who_began_it_and_has_nothing_of_that_process) {
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  constexpr int inherited = 77;
  auto node = std::make_unique<command>(
      std::vector<std::string>{"node", file->path(), "--name", "cache-0"}, [&] {
        ::dup2(ends[1], inherited);
        ::dup2(ends[1], STDIN_FILENO);
      });
  ::close(ends[1]);
  ASSERT_TRUE(registers(*node)) << node->err();
  const auto pid = supervisor.wait();
  ASSERT_GT(pid, 0) << supervisor.log();
  const auto number = std::to_string(pid);
  EXPECT_NE(standing_of(number).parent, node->pid());
  EXPECT_NE(::getsid(pid), ::getsid(0));
  EXPECT_EQ(fs::read_symlink("/proc/" + number + "/cwd").string(), "/");
  for (const auto* stream : {"0", "1", "2"})
    EXPECT_EQ(fs::read_symlink("/proc/" + number + "/fd/" + stream).string(), "/dev/null");

  node->signal(SIGKILL);
  EXPECT_EQ(node->wait(), 128 + SIGKILL);
  // The other end is closed in every process.
  pollfd reader{ends[0], POLLIN, 0};
  char none = 0;
  EXPECT_EQ(::poll(&reader, 1, static_cast<int>(std::chrono::milliseconds{wait_limit}.count())), 1);
  EXPECT_EQ(::read(ends[0], &none, 1), 0);
  ::close(ends[0]);
  EXPECT_TRUE(supervisor.lives());
  EXPECT_EQ(supervisor.pid(), pid);
}

TEST_F(begun, may_use_all_cores_whichever_those_of_who_began_it_are) {
  cpu_set_t all{};
  if (::sched_getaffinity(0, sizeof all, &all) != 0)
    GTEST_SKIP() << "more cores than such a set has";
  int last = 0;
  for (int core = 0; core < CPU_SETSIZE; ++core)
    if (CPU_ISSET(core, &all) != 0) last = core;
  command node{{"node", file->path(), "--name", "cache-0"}, [last] {
                 cpu_set_t one{};
                 CPU_SET(last, &one);
                 ::sched_setaffinity(0, sizeof one, &one);
               }};
  ASSERT_TRUE(registers(node)) << node.err();
  cpu_set_t own{};
  ASSERT_EQ(::sched_getaffinity(node.pid(), sizeof own, &own), 0);
  EXPECT_EQ(CPU_COUNT(&own), 1);
  const auto pid = supervisor.wait();
  ASSERT_GT(pid, 0) << supervisor.log();
  ASSERT_EQ(::sched_getaffinity(pid, sizeof own, &own), 0);
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &all) == 0) continue;
    const bool may_use = CPU_ISSET(core, &own) != 0;
    EXPECT_TRUE(may_use) << core;
  }
}

TEST_F(begun, or_waited_for_is_given_up_by_a_node_that_is_told_to_end) {
  const scratch_folder folder;
  const auto hangs = folder.path() + "/hangs";
  const auto mark = folder.path() + "/mark";
  std::ofstream{hangs} << "#!/bin/sh\necho $$ > " << mark << "\nexec sleep 600\n";
  fs::permissions(hangs, fs::perms::owner_all);
  for (const auto& which : {std::vector<std::string>{"--name", "cache-0"},
                            std::vector<std::string>{"--stage", "cache"}}) {
    fs::remove(mark);
    auto arguments = which;
    arguments.insert(arguments.begin(), {"node", file->path()});
    command node{arguments, [&] { ::setenv("TROUPE_COMMAND", hangs.c_str(), 1); }};
    pid_t child = -1;
    const auto has_begun = [&] {
      std::string line;
      std::ifstream in{mark};
      if (!std::getline(in, line) || in.eof()) return false;  // not written completely yet
      child = static_cast<pid_t>(std::stol(line));
      return true;
    };
    ASSERT_TRUE(comes_true(has_begun, 10ms)) << node.err();
    node.signal(SIGTERM);
    EXPECT_EQ(node.wait(), 0) << node.err();
    EXPECT_TRUE(vanishes(child)) << which.front();
  }
  EXPECT_FALSE(supervisor.lives());
}

TEST_F(begun, is_neither_started_nor_stopped_by_up) {
  command up{{"up", file->path()}};
  ASSERT_TRUE(up.says("2 nodes are up")) << up.out() << up.err() << supervisor.log();
  EXPECT_THAT(up.out(),
              HasSubstr("the supervisor is begun on 127.0.0.1 by the first node there that "
                        "finds none, and stays when this command ends"));
  EXPECT_THAT(up.out(), Not(HasSubstr("supervisor (pid")));
  const auto pid = supervisor.wait();
  ASSERT_GT(pid, 0) << supervisor.log();
  up.signal(SIGTERM);
  EXPECT_EQ(up.wait(), 0) << up.err();
  EXPECT_TRUE(supervisor.lives());
  EXPECT_EQ(supervisor.pid(), pid);
  const auto only = run({"up", file->path(), "--only", "supervisor"});
  EXPECT_EQ(only.code, 2);
  EXPECT_THAT(only.err, HasSubstr("begin: true"));
}

TEST_F(begun, in_vain_is_an_error_with_the_end_of_its_log) {
  const taken_port taken;
  describe(text("port: " + std::to_string(taken.number())));
  auto node = launch("cache-0");
  EXPECT_EQ(node->wait(), 1) << node->err();
  EXPECT_THAT(node->err(), HasSubstr("ended before it listened"));
  EXPECT_THAT(node->err(), HasSubstr(supervisor.folder() + "/supervisor.log"));
  EXPECT_THAT(node->err(), HasSubstr("already_exists"));
  EXPECT_THAT(node->err(), HasSubstr(std::to_string(taken.number())));
  EXPECT_FALSE(supervisor.lives());
}

TEST_F(begun, is_not_where_a_node_is_told_where_the_supervisor_is) {
  const auto port = free_port();
  command node{
      {"node", file->path(), "--name", "cache-0", "--supervisor-port", std::to_string(port)}};
  ASSERT_TRUE(node.says("not registered with the supervisor at 127.0.0.1:" + std::to_string(port)))
      << node.err();
  EXPECT_FALSE(supervisor.lives());
  command by_hand{
      {"node", file->path(), "--name", "supervisor", "--supervisor-port", std::to_string(port)}};
  EXPECT_TRUE(registers(node)) << node.err();
  EXPECT_EQ(supervisor.wait(), by_hand.pid()) << "it can be found like one that was begun";
}

TEST_F(begun, by_a_program_that_embeds_an_engine_and_knows_the_command) {
  const auto start = [&](const std::function<void()>& prepare) {
    return std::make_unique<command>(EMBEDDED_START,
                                     std::vector<std::string>{file->path(), "cache-0"}, prepare);
  };
  auto without = start([] { ::setenv("PATH", "/nowhere", 1); });
  EXPECT_EQ(without->wait(), 3) << without->err();
  EXPECT_THAT(without->err(), HasSubstr("not_found: no supervisor can be begun"));
  EXPECT_THAT(without->err(), HasSubstr("TROUPE_COMMAND"));
  auto with = start([] { ::setenv("TROUPE_COMMAND", TROUPE_COMMAND, 1); });
  EXPECT_EQ(with->wait(), 0) << with->err() << supervisor.log();
  EXPECT_GT(supervisor.wait(), 0) << supervisor.log();
}

// -- a process in the background

TEST_F(begun, a_node_goes_on_in_the_background_once_what_it_was_given_is_right) {
  const auto wrong = run({"node", file->path(), "--name", "cache-9", "--detach"});
  EXPECT_EQ(wrong.code, 2);
  EXPECT_THAT(wrong.err, HasSubstr("the deployment has no node cache-9"));
  const scratch_folder folder;
  const auto began = run({"node", file->path(), "--name", "supervisor", "--detach", "--log-file",
                          folder.path() + "/it.log"});
  EXPECT_EQ(began.code, 0) << began.err;
  EXPECT_EQ(began.out + began.err, "");
  const auto pid = supervisor.wait();
  ASSERT_GT(pid, 0);
  EXPECT_THAT(text_of(folder.path() + "/it.log"), HasSubstr("keeps no state file"));
  auto node = launch("cache-0");
  ASSERT_TRUE(registers(*node)) << node->err();
  EXPECT_EQ(supervisor.pid(), pid);
}

}  // namespace
