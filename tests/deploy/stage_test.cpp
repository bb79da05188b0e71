// Processes that are started for a stage, and how long a node waits for its supervisor: real
// processes that are started at the same time, killed and started again.

#include <algorithm>
#include <chrono>
#include <csignal>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include "troupe/actors/leased_name.hpp"
#include "troupe/config/parse.hpp"

#include "command.hpp"

namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;
using ::testing::Not;
using namespace troupe::testing;

std::string caches(std::uint16_t port, int replicas, const std::string& hosts = "127.0.0.1") {
  return "cluster: stage-test\nsupervisor: {host: 127.0.0.1, port: " + std::to_string(port) +
         ", heartbeat_interval: 200ms, heartbeat_timeout: 3s, state_file: none}\n"
         "stages:\n  - {name: cache, role: store, replicas: " +
         std::to_string(replicas) + ", hosts: [" + hosts + "], pool: {size: 1MiB}}\n";
}

/// A supervisor of a stage, and processes that were started for it.
class stage : public ::testing::Test {
 protected:
  std::uint16_t port{free_port()};
  std::unique_ptr<deployment_on_disk> file;
  std::unique_ptr<command> supervisor;

  void expect(int replicas, const std::string& hosts = "127.0.0.1") {
    file = std::make_unique<deployment_on_disk>(caches(port, replicas, hosts));
  }
  void start_supervisor() {
    supervisor = std::make_unique<command>(
        std::vector<std::string>{"node", file->path(), "--name", "supervisor"});
    ASSERT_TRUE(supervisor->says("listens at")) << supervisor->err();
  }
  [[nodiscard]] std::unique_ptr<command> launch(const std::vector<std::string>& more = {}) const {
    std::vector<std::string> all{"node", file->path(), "--stage", "cache"};
    all.insert(all.end(), more.begin(), more.end());
    return std::make_unique<command>(all);
  }
  /// Waits until the process is registered. Returns its name.
  static std::string name_of(command& process) {
    EXPECT_TRUE(process.says(registered)) << process.err();
    const std::string before = "the supervisor assigned the name ";
    const auto at = process.err().find(before);
    if (at == std::string::npos) return "none";
    const auto begin = at + before.size();
    return process.err().substr(begin, process.err().find('\n', begin) - begin);
  }
  [[nodiscard]] nlohmann::json shown(const std::string& name) const {
    const auto all = nlohmann::json::parse(run({"status", file->path(), "--json"}).out);
    for (const auto& node : all.at("nodes"))
      if (node.at("name") == name) return node;
    return {};
  }
};

TEST_F(stage, gives_launchers_that_start_at_once_a_name_each_and_a_freed_one_to_the_next) {
  expect(8);
  start_supervisor();
  std::vector<std::unique_ptr<command>> launched;
  for (int i = 0; i < 8; ++i) launched.push_back(launch());
  std::set<std::string> names;
  std::map<std::string, command*> by_name;
  for (auto& one : launched) {
    const auto name = name_of(*one);
    EXPECT_TRUE(names.insert(name).second) << name << " twice";
    by_name[name] = one.get();
  }
  const std::set<std::string> all{"cache-0", "cache-1", "cache-2", "cache-3",
                                  "cache-4", "cache-5", "cache-6", "cache-7"};
  ASSERT_EQ(names, all);
  EXPECT_EQ(run_until_good({"status", file->path()}).code, 0);

  by_name["cache-3"]->signal(SIGKILL);
  EXPECT_EQ(by_name["cache-3"]->wait(), 128 + SIGKILL);
  EXPECT_TRUE(comes_true([&] { return shown("cache-3").at("state") == "down"; }, 50ms));
  EXPECT_EQ(shown("cache-3").at("reason"),
            "connection lost: its process is gone, or the connection to it");
  auto next = launch();
  EXPECT_EQ(name_of(*next), "cache-3");

  auto ninth = launch();
  ASSERT_TRUE(ninth->says("none of the 8 nodes of stage 'cache'")) << ninth->err();
  EXPECT_THAT(ninth->err(), HasSubstr("overloaded"));
  by_name["cache-5"]->signal(SIGKILL);
  EXPECT_EQ(name_of(*ninth), "cache-5");
  EXPECT_EQ(run_until_good({"status", file->path()}).code, 0);
  EXPECT_EQ(shown("cache-5").at("pid"), ninth->pid());
}

TEST_F(stage, finds_its_name_when_the_supervisor_comes_later_and_stops_while_it_waits) {
  expect(1);
  auto waits = launch();
  ASSERT_TRUE(waits->says("keeps asking the supervisor at 127.0.0.1:" + std::to_string(port)))
      << waits->err();
  auto stopped = launch();
  ASSERT_TRUE(stopped->says("keeps asking")) << stopped->err();
  stopped->signal(SIGTERM);
  EXPECT_EQ(stopped->wait(), 0) << stopped->err();
  start_supervisor();
  EXPECT_EQ(name_of(*waits), "cache-0");
}

TEST_F(stage, keeps_a_claimed_name_from_others_until_its_process_had_time_to_register) {
  expect(1);
  start_supervisor();
  const auto parsed = troupe::config::parse(caches(port, 1), "test.yaml");
  ASSERT_TRUE(parsed.value);
  auto claimed = troupe::actors::leased_name::claim(*parsed.value, "cache", {});
  ASSERT_TRUE(claimed) << to_string(claimed.error());
  EXPECT_EQ((*claimed)->name(), "cache-0");
  std::this_thread::sleep_for(4s);  // longer than an unrepeated claim is held
  command named{{"node", file->path(), "--name", "cache-0"}};
  ASSERT_TRUE(named.says("already_exists")) << named.err();
  EXPECT_THAT(named.err(), HasSubstr("was claimed by pid " + std::to_string(::getpid()) +
                                     " on host '127.0.0.1'"));
  claimed->reset();
  EXPECT_TRUE(named.says(registered)) << named.err();
}

TEST_F(stage, keeps_a_claimed_name_for_its_process_when_the_supervisor_is_restarted) {
  expect(2);
  start_supervisor();
  const auto parsed = troupe::config::parse(caches(port, 2), "test.yaml");
  ASSERT_TRUE(parsed.value);
  auto first = troupe::actors::leased_name::claim(*parsed.value, "cache", {});
  ASSERT_TRUE(first) << to_string(first.error());
  auto second = troupe::actors::leased_name::claim(*parsed.value, "cache", {});
  ASSERT_TRUE(second) << to_string(second.error());
  ASSERT_EQ((*second)->name(), "cache-1");
  first->reset();
  supervisor->signal(SIGKILL);
  EXPECT_EQ(supervisor->wait(), 128 + SIGKILL);
  start_supervisor();
  std::this_thread::sleep_for(4s);  // the claim was repeated, and every name is assigned
  command named{{"node", file->path(), "--name", "cache-1"}};
  ASSERT_TRUE(named.says("was claimed by pid " + std::to_string(::getpid()))) << named.err();
  command other{{"node", file->path(), "--name", "cache-0"}};
  EXPECT_TRUE(other.says(registered)) << other.err();
  EXPECT_THAT(other.err(), Not(HasSubstr("already_exists")));
  second->reset();
  EXPECT_TRUE(named.says(registered)) << named.err();
}

TEST_F(stage, on_automatic_hosts_listens_at_the_address_that_leads_to_the_supervisor) {
  expect(2, "auto");
  start_supervisor();
  auto first = launch();
  EXPECT_EQ(name_of(*first), "cache-0");
  EXPECT_THAT(first->err(), HasSubstr("cache-0 listens at 127.0.0.1:"));
  command second{{"node", file->path(), "--name", "cache-1"}};
  ASSERT_TRUE(second.says(registered)) << second.err();
  EXPECT_THAT(second.err(), HasSubstr("cache-1 listens at 127.0.0.1:"));
  EXPECT_EQ(run_until_good({"status", file->path()}).code, 0);
}

TEST_F(stage, that_is_not_there_or_no_ones_to_start_here_is_an_error) {
  expect(1);
  const auto refused = [&](std::vector<std::string> more) {
    more.insert(more.begin(), {"node", file->path()});
    const auto ended = run(more);
    EXPECT_EQ(ended.code, 2) << ended.err;
    return ended.err;
  };
  EXPECT_THAT(refused({"--stage", "decode"}),
              HasSubstr("not_found: the deployment has no stage 'decode'; it has cache"));
  EXPECT_THAT(refused({}), HasSubstr("--name or --stage is required"));
  EXPECT_THAT(refused({"--name", "cache-0", "--stage", "cache"}), HasSubstr("excludes"));
  EXPECT_THAT(refused({"--name", "supervisor", "--wait-limit", "1s"}),
              HasSubstr("the supervisor waits for no other node"));
  EXPECT_THAT(refused({"--stage", "cache", "--wait-limit", "soon"}), HasSubstr("like 60s or 5min"));
  const deployment_on_disk external{
      "cluster: stage-test\nsupervisor: {port: 7400}\n"
      "stages:\n  - {name: decode, role: decode, engine: external}\n"};
  const auto ended = run({"node", external.path(), "--stage", "decode"});
  EXPECT_EQ(ended.code, 2);
  EXPECT_THAT(ended.err, HasSubstr("troupe/actors/leased_name.hpp"));
}

TEST_F(stage, that_is_open_has_no_names_to_give) {
  const std::string text =
      "cluster: stage-test\nsupervisor: {port: 7400}\n"
      "stages:\n  - {name: engines, role: both, open: {}}\n";
  const deployment_on_disk joined{text};
  for (const auto& which : {std::vector<std::string>{"--stage", "engines"},
                            std::vector<std::string>{"--name", "engines.a.0"}}) {
    auto all = which;
    all.insert(all.begin(), {"node", joined.path()});
    const auto ended = run(all);
    EXPECT_EQ(ended.code, 2);
    EXPECT_THAT(ended.err, HasSubstr("invalid_config: stage engines is open"));
    EXPECT_THAT(ended.err, HasSubstr("engine_options::join"));
  }
  const auto parsed = troupe::config::parse(text, "test.yaml");
  ASSERT_TRUE(parsed.value);
  const auto claimed = troupe::actors::leased_name::claim(*parsed.value, "engines", {});
  ASSERT_FALSE(claimed);
  EXPECT_EQ(claimed.error().code, troupe::errc::invalid_config);
  EXPECT_THAT(claimed.error().message, HasSubstr("stage 'engines' is open"));
}

// -- how long a node waits for its supervisor

TEST_F(stage, a_node_waits_for_its_supervisor_as_long_as_it_was_told_to) {
  expect(1);
  for (const auto& which : {std::vector<std::string>{"--name", "cache-0"},
                            std::vector<std::string>{"--stage", "cache"}}) {
    auto all = which;
    all.insert(all.begin(), {"node", file->path()});
    all.insert(all.end(), {"--wait-limit", "1500ms", "--log-level", "off"});
    const auto began = std::chrono::steady_clock::now();
    command waits{all};
    EXPECT_EQ(waits.wait(), 1) << waits.err();
    EXPECT_GE(std::chrono::steady_clock::now() - began, 1s);
    EXPECT_THAT(waits.err(), HasSubstr("deadline: "));
    EXPECT_THAT(waits.err(), HasSubstr("1500"));
    EXPECT_THAT(waits.err(), HasSubstr("peer_unreachable"));
  }
}

TEST_F(stage, a_node_whose_name_stays_taken_says_so_when_it_has_waited_long_enough) {
  expect(1);
  start_supervisor();
  auto holder = launch({"--wait-limit", "10min"});
  ASSERT_EQ(name_of(*holder), "cache-0");
  const auto limited = [&](std::vector<std::string> which) {
    which.insert(which.begin(), {"node", file->path(), "--wait-limit", "1s"});
    const auto ended = run(which);
    EXPECT_EQ(ended.code, 1) << ended.err;
    return ended.err;
  };
  // On a busy machine it may not have been answered in that time.
  std::string named;
  const auto answered = [&] {
    named = limited({"--name", "cache-0"});
    return named.find("already_exists") != std::string::npos;
  };
  EXPECT_TRUE(comes_true(answered)) << named;
  EXPECT_THAT(named, HasSubstr("cache-0 was not registered within the 1s of --wait-limit: "));
  std::string claimed;
  const auto told = [&] {
    claimed = limited({"--stage", "cache"});
    return claimed.find("overloaded") != std::string::npos;
  };
  EXPECT_TRUE(comes_true(told)) << claimed;
  EXPECT_THAT(claimed, HasSubstr("within 1 s: overloaded: none of the 1 node"));
  // The limit applies to the start alone.
  auto patient = std::make_unique<command>(
      std::vector<std::string>{"node", file->path(), "--name", "cache-0", "--wait-limit", "10min"});
  ASSERT_TRUE(patient->says("already_exists")) << patient->err();
  holder->signal(SIGTERM);
  EXPECT_EQ(holder->wait(), 0) << holder->err();
  EXPECT_TRUE(patient->says(registered)) << patient->err();
}

TEST_F(stage, a_node_that_was_taken_in_stays_whatever_its_limit_is) {
  expect(1);
  start_supervisor();
  auto node = launch({"--wait-limit", "20s"});
  ASSERT_EQ(name_of(*node), "cache-0");
  supervisor->signal(SIGKILL);
  EXPECT_EQ(supervisor->wait(), 128 + SIGKILL);
  EXPECT_EQ(node->wait_for(24s), -1) << "it waits for the next one";
  start_supervisor();
  node->signal(SIGTERM);
  EXPECT_EQ(node->wait(), 0) << node->err();
}

}  // namespace
