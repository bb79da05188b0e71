#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <optional>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "command.hpp"
#include "text_of.hpp"

namespace {

using ::testing::HasSubstr;
using namespace troupe::testing;

const nlohmann::json& node_of(const nlohmann::json& status, const std::string& name) {
  static const nlohmann::json none;
  for (const auto& node : status.at("nodes"))
    if (node.at("name") == name) return node;
  return none;
}

/// The backends that a node, or `troupe info`, can use, with a reason for those that it cannot. The
/// reason of a usable backend is left out, since that of tcp names a port of each process.
std::map<std::string, std::string> verdicts(const nlohmann::json& who) {
  std::map<std::string, std::string> all;
  for (const auto& one : who.at("backends")) {
    all[one.at("name")] = one.at("usable") ? "usable" : one.at("reason");
  }
  return all;
}

TEST(status, shows_the_same_cluster_to_people_and_to_programs_by_file_and_by_address) {
  const auto port = free_port();
  const deployment_on_disk file{port};
  command up{{"up", file.path()}};
  ASSERT_TRUE(up.says("4 nodes are up")) << up.out() << up.err();
  const auto by_file = run_until_good({"status", file.path(), "--json"});
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
  const auto here = verdicts(nlohmann::json::parse(run({"info", "--json"}).out));
  EXPECT_EQ(here.size(), 4u);
  for (const auto& node : status.at("nodes")) EXPECT_EQ(verdicts(node), here) << node.at("name");

  const auto by_address = run_until_good({"status", "127.0.0.1:" + std::to_string(port)});
  EXPECT_EQ(by_address.code, 0) << by_address.err;
  for (const auto* name : {"prefill-0", "decode-0", "cache-0"})
    EXPECT_THAT(by_address.out, HasSubstr(std::string{"\n"} + name + " "));
  EXPECT_THAT(by_address.out, HasSubstr("\nBACKENDS OF  USABLE"));
}

class status_of_a_load : public ::testing::TestWithParam<const char*> {
 protected:
  /// Starts a load that runs until the test ends, and finds its supervisor's address.
  void SetUp() override {
    if (std::string{GetParam()} == "rdma" && std::getenv("TROUPE_VERBS") == nullptr) {
      GTEST_SKIP() << "needs RDMA devices: tests/run verbs";
    }
    load_.emplace(std::vector<std::string>{"bench", "--layers", "2", "--tokens", "64", "--duration",
                                           "1h", "--backend", GetParam()});
    ASSERT_TRUE(load_->says("GB/s")) << load_->out() << load_->err();
    const std::string before = "troupe status ";
    const auto at = load_->out().find(before);
    ASSERT_NE(at, std::string::npos) << load_->out();
    const auto begin = at + before.size();
    supervisor_ = load_->out().substr(begin, load_->out().find('\n', begin) - begin);
  }
  [[nodiscard]] nlohmann::json link_of(const std::string& node) const {
    const auto ended = run({"status", supervisor_, "--json"});
    const auto status = nlohmann::json::parse(ended.out);
    return node_of(status, node).at("links").at(0);
  }

  std::optional<command> load_;
  std::string supervisor_;
};

TEST_P(status_of_a_load, counts_what_its_links_do) {
  const auto before = link_of("prefill-0");
  EXPECT_EQ(before.at("backend"), GetParam());
  EXPECT_GT(before.at("posted"), 0);
  nlohmann::json after;
  const auto all_moved = [&] {
    after = link_of("prefill-0");
    const auto counters = {"posted", "completed", "bytes_out"};
    return std::all_of(counters.begin(), counters.end(),
                       [&](const auto* one) { return after.at(one) > before.at(one); });
  };
  EXPECT_TRUE(comes_true(all_moved, std::chrono::milliseconds{100})) << after;
  EXPECT_GE(after.at("posted").get<std::uint64_t>(),
            after.at("completed").get<std::uint64_t>() + after.at("failed").get<std::uint64_t>());
  EXPECT_EQ(after.at("failed"), 0);

  const auto text = run({"status", supervisor_}).out;
  for (const auto* column : {" OPEN ", " NO LINK ", " POSTED ", " DONE "})
    EXPECT_THAT(text, HasSubstr(column));
  if (std::string{GetParam()} != "rdma") {
    EXPECT_TRUE(after.at("by_lane").empty());
    EXPECT_THAT(text, ::testing::Not(HasSubstr("LANE OF")));
    return;
  }
  ASSERT_EQ(after.at("by_lane").size(), after.at("lanes"));
  const auto& lane = after.at("by_lane").at(0);
  EXPECT_THAT(lane.at("device").get<std::string>(), ::testing::StartsWith("rxe"));
  EXPECT_EQ(lane.at("port"), 1);
  EXPECT_THAT(lane.at("gid").get<std::string>(), HasSubstr("10.77."));
  EXPECT_GT(lane.at("requests_completed"), 0);
  EXPECT_GE(lane.at("requests_posted"), lane.at("requests_completed"));
  EXPECT_GT(lane.at("bytes"), 0);
  EXPECT_TRUE(lane.at("port_retries").is_number()) << lane;
  EXPECT_THAT(text, HasSubstr("LANE OF"));
  EXPECT_THAT(text, HasSubstr("PORT RETRIES"));
  EXPECT_THAT(text, HasSubstr(lane.at("device").get<std::string>()));
}

INSTANTIATE_TEST_SUITE_P(over, status_of_a_load, ::testing::Values("shm", "tcp", "rdma"),
                         [](const auto& tested) { return std::string{tested.param}; });

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
  auto text = text_of(file.path());
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
  nlohmann::json status;
  // On a busy machine another node may be late once.
  const auto others_answer = [&] {
    const auto ended = run({"status", file.path(), "--json", "--timeout-ms", "1500"});
    EXPECT_EQ(ended.code, 3);
    status = nlohmann::json::parse(ended.out);
    return node_of(status, "prefill-0").contains("pool");
  };
  EXPECT_TRUE(comes_true(others_answer)) << status;
  ::kill(frozen.pid, SIGCONT);
  EXPECT_EQ(node_of(status, "decode-0").at("error").at("code"), "deadline");
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
