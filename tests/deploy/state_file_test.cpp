#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "command.hpp"

// The supervisor's state on disk, as an operator sees it.
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;
using namespace troupe::testing;

/// A deployment of one store, with a state file at the place that the test names.
struct kept : ::testing::Test {
  scratch_folder folder;
  std::uint16_t port{free_port()};

  [[nodiscard]] std::string file(const std::string& state_file) const {
    const auto path = folder.path() + "/deployment.yaml";
    std::ofstream{path} << "cluster: kept\nsupervisor: {port: " << port
                        << ", heartbeat_interval: 200ms, heartbeat_timeout: 3s, state_file: "
                        << state_file
                        << "}\nstages:\n  - {name: cache, role: store, pool: {size: 1MiB}}\n";
    return path;
  }
  [[nodiscard]] static command node(const std::string& file, const std::string& name) {
    return command{{"node", file, "--name", name}};
  }
};

TEST_F(kept, goes_on_where_a_killed_supervisor_ended_and_refuses_lives_that_were_replaced_before) {
  const auto deployment = file(folder.path() + "/kept.state");
  auto first = node(deployment, "supervisor");
  auto former = node(deployment, "cache-0");
  ASSERT_TRUE(former.says(registered)) << former.err();
  former.signal(SIGSTOP);
  auto store = node(deployment, "cache-0");
  ASSERT_TRUE(store.says(registered)) << store.err();
  ASSERT_EQ(run_until_good({"status", deployment}).code, 0);
  first.signal(SIGKILL);
  ASSERT_EQ(first.wait(), 128 + SIGKILL);

  auto second = node(deployment, "supervisor");
  ASSERT_TRUE(second.says("goes on from epoch ")) << second.err();
  ASSERT_TRUE(second.says("event=up node=cache-0")) << second.err();
  former.signal(SIGCONT);
  EXPECT_EQ(former.wait(), 4) << former.err();
  EXPECT_THAT(former.err(), HasSubstr("stale_incarnation"));
  const auto status = nlohmann::json::parse(run_until_good({"status", deployment, "--json"}).out);
  EXPECT_GT(status.at("epoch").get<int>(), 1000);
  EXPECT_EQ(status.at("nodes").at(0).at("pid"), store.pid());
}

TEST_F(kept, is_not_shared_by_two_supervisors) {
  const auto deployment = file("auto");
  auto first = node(deployment, "supervisor");
  ASSERT_TRUE(first.says("listens at")) << first.err();
  auto second = node(deployment, "supervisor");
  EXPECT_EQ(second.wait(), 1);
  EXPECT_THAT(second.err(), HasSubstr("/troupe/kept-" + std::to_string(port) + ".state"));
  EXPECT_THAT(second.err(),
              HasSubstr("is used by another supervisor (pid " + std::to_string(first.pid()) + ")"));
}

TEST_F(kept, is_refused_where_it_was_named_and_cannot_be_written) {
  auto supervisor = node(file("/proc/no-such/kept.state"), "supervisor");
  EXPECT_EQ(supervisor.wait(), 1);
  EXPECT_THAT(supervisor.err(),
              HasSubstr("invalid_config: the state file /proc/no-such/kept.state"));
}

TEST_F(kept, is_begun_afresh_where_it_is_damaged_and_the_log_names_it) {
  const auto state = folder.path() + "/kept.state";
  std::ofstream{state} << "troupe-membership 1 0000000000000000\n{}";
  auto supervisor = node(file(state), "supervisor");
  ASSERT_TRUE(supervisor.says("listens at")) << supervisor.err();
  EXPECT_THAT(supervisor.err(), HasSubstr(state + " cannot be used: it is damaged"));
  EXPECT_TRUE(std::filesystem::exists(state + ".bad"));
}

TEST_F(kept, is_left_out_where_the_file_says_none) {
  auto supervisor = node(file("none"), "supervisor");
  ASSERT_TRUE(supervisor.says("listens at")) << supervisor.err();
  EXPECT_THAT(supervisor.err(), HasSubstr("keeps no state file"));
  supervisor.signal(SIGTERM);
  EXPECT_EQ(supervisor.wait(), 0);
}

}  // namespace
