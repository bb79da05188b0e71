#include <regex>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "command.hpp"
#include "text_of.hpp"

// The names of the command's processes in ps, top and pgrep.
namespace {

using ::testing::StartsWith;
using namespace troupe::testing;

std::string comm_of(pid_t pid) {
  auto text = text_of("/proc/" + std::to_string(pid) + "/comm");
  if (!text.empty()) text.pop_back();
  return text;
}

std::string command_line_of(pid_t pid) {
  auto text = text_of("/proc/" + std::to_string(pid) + "/cmdline");
  for (auto& c : text)
    if (c == '\0') c = ' ';
  return text;
}

std::string address_in(const std::string& output) {
  static const std::regex line{R"(supervisor\s+(127\.0\.0\.1:\d+))"};
  std::smatch found;
  return std::regex_search(output, found, line) ? found[1].str() : std::string{};
}

TEST(process, of_each_node_has_a_name_that_says_which_it_is) {
  const deployment_on_disk file{free_port()};
  command up{{"up", file.path()}};
  ASSERT_TRUE(up.says("4 nodes are up")) << up.out() << up.err();
  EXPECT_EQ(comm_of(node_in(up.out(), "supervisor").pid), "troupe:supervis");
  EXPECT_EQ(comm_of(node_in(up.out(), "prefill-0").pid), "troupe:prefil-0");
  EXPECT_EQ(comm_of(node_in(up.out(), "decode-0").pid), "troupe:decode-0");
  EXPECT_EQ(comm_of(node_in(up.out(), "cache-0").pid), "troupe:cache-0");
  for (const auto& node : nodes_in(up.out()))
    EXPECT_THAT(command_line_of(node.pid), StartsWith("troupe node ")) << node.name;
}

class load : public ::testing::TestWithParam<std::vector<std::string>> {};

TEST_P(load, says_where_its_supervisor_is_so_that_status_shows_processes_with_names) {
  command troupe{GetParam()};
  ASSERT_TRUE(troupe.says(GetParam()[0] == "demo" ? "nodes      " : "GB/s")) << troupe.out();
  const auto address = address_in(troupe.out());
  ASSERT_NE(address, "") << troupe.out();
  const auto status = run_until_good({"status", address, "--json"});
  ASSERT_EQ(status.code, 0) << status.err;
  const auto shown = nlohmann::json::parse(status.out);
  ASSERT_EQ(shown.at("nodes").size(), 2u);
  std::set<std::string> names;
  for (const auto& node : shown.at("nodes")) names.insert(comm_of(node.at("pid")));
  // The decode engine of a bench runs in the command itself.
  EXPECT_TRUE(names.contains("troupe:prefil-0")) << ::testing::PrintToString(names);
  EXPECT_TRUE(names.contains(GetParam()[0] == "demo" ? "troupe:decode-0" : "troupe"))
      << ::testing::PrintToString(names);
}

INSTANTIATE_TEST_SUITE_P(process, load,
                         ::testing::Values(std::vector<std::string>{"demo", "--requests", "1000"},
                                           std::vector<std::string>{"bench", "--tokens", "64",
                                                                    "--duration", "1h"}),
                         [](const auto& tested) { return tested.param[0]; });

}  // namespace
