#include <csignal>
#include <cstdio>
#include <fstream>
#include <iterator>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "command.hpp"

namespace {

using ::testing::HasSubstr;
using namespace troupe::testing;

const nlohmann::json& node_of(const nlohmann::json& status, const std::string& name) {
  static const nlohmann::json none;
  for (const auto& node : status.at("nodes"))
    if (node.at("name") == name) return node;
  return none;
}

TEST(status, shows_the_same_cluster_to_people_and_to_programs_by_file_and_by_address) {
  const auto port = free_port();
  const deployment_on_disk file{port};
  command up{{"up", file.path()}};
  ASSERT_TRUE(up.says("4 nodes are up")) << up.out() << up.err();
  const auto by_file = run({"status", file.path(), "--json"});
  ASSERT_EQ(by_file.code, 0) << by_file.out << by_file.err;
  const auto status = nlohmann::json::parse(by_file.out);
  EXPECT_EQ(status.at("cluster"), "cli-test");
  EXPECT_EQ(status.at("complete"), true);
  ASSERT_EQ(status.at("nodes").size(), 3u);
  for (const auto& node : status.at("nodes")) {
    EXPECT_EQ(node.at("state"), "up");
    EXPECT_EQ(node.at("pid"), node_in(up.out(), node.at("name")).pid);
    EXPECT_EQ(node.at("port"), node_in(up.out(), node.at("name")).port);
  }
  EXPECT_GT(node_of(status, "prefill-0").at("pool").at("blocks_total"), 0);
  EXPECT_EQ(node_of(status, "cache-0").at("pool").at("store_bytes"), 1 << 20);

  const auto by_address = run({"status", "127.0.0.1:" + std::to_string(port)});
  EXPECT_EQ(by_address.code, 0) << by_address.err;
  for (const auto* name : {"prefill-0", "decode-0", "cache-0"})
    EXPECT_THAT(by_address.out, HasSubstr(std::string{"\n"} + name + " "));
}

TEST(status, a_node_that_never_came_is_shown_and_the_code_is_three) {
  const deployment_on_disk file{free_port()};
  command up{{"up", file.path(), "--only", "supervisor", "--only", "prefill"}};
  ASSERT_TRUE(up.says("2 nodes are up")) << up.out() << up.err();
  const auto ended = run({"status", file.path(), "--json"});
  EXPECT_EQ(ended.code, 3);
  const auto status = nlohmann::json::parse(ended.out);
  EXPECT_EQ(status.at("complete"), false);
  EXPECT_EQ(node_of(status, "prefill-0").at("state"), "up");
  EXPECT_EQ(node_of(status, "decode-0").at("registered"), false);
  EXPECT_EQ(node_of(status, "decode-0").at("error").at("code"), "not_found");
}

TEST(status, of_a_file_whose_port_another_cluster_has_fails_and_names_both) {
  const deployment_on_disk file{free_port()};
  command up{{"up", file.path(), "--only", "supervisor"}};
  ASSERT_TRUE(up.says("1 node is up")) << up.out() << up.err();
  std::ifstream in{file.path()};
  std::string text{std::istreambuf_iterator<char>{in}, {}};
  text.replace(text.find("cluster: "), text.find('\n') - text.find("cluster: "), "cluster: other");
  const auto other = file.path() + ".other.yaml";
  std::ofstream{other} << text;
  const auto ended = run({"status", other});
  std::remove(other.c_str());
  EXPECT_EQ(ended.code, 1);
  EXPECT_THAT(ended.err, HasSubstr("`other`"));
}

TEST(status, a_frozen_node_is_shown_with_the_reason_and_does_not_hold_the_others_up) {
  const deployment_on_disk file{free_port()};
  command up{{"up", file.path()}};
  ASSERT_TRUE(up.says("4 nodes are up")) << up.out() << up.err();
  const auto frozen = node_in(up.out(), "decode-0");
  ASSERT_EQ(::kill(frozen.pid, SIGSTOP), 0);
  const auto ended = run({"status", file.path(), "--json", "--timeout-ms", "500"});
  ::kill(frozen.pid, SIGCONT);
  EXPECT_EQ(ended.code, 3);
  const auto status = nlohmann::json::parse(ended.out);
  EXPECT_EQ(node_of(status, "decode-0").at("error").at("code"), "deadline");
  EXPECT_TRUE(node_of(status, "prefill-0").contains("pool"));
}

TEST(status, without_a_supervisor_fails_and_names_its_address) {
  const auto address = "127.0.0.1:" + std::to_string(free_port());
  const auto ended = run({"status", address});
  EXPECT_EQ(ended.code, 1);
  EXPECT_THAT(ended.err, HasSubstr("peer_unreachable"));
  EXPECT_THAT(ended.err, HasSubstr(address));
}

TEST(status, what_is_neither_a_file_nor_an_address_ends_with_two) {
  for (const auto* where : {"nowhere.yaml", "127.0.0.1:", "127.0.0.1:70000", ":7400", "a b:7400"}) {
    const auto ended = run({"status", where});
    EXPECT_EQ(ended.code, 2) << where;
    EXPECT_THAT(ended.err, HasSubstr("neither a deployment file nor HOST:PORT")) << where;
  }
}

}  // namespace
