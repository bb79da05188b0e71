#include "troupe/deploy/cli/status_report.hpp"

#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

namespace {

using namespace troupe;
using deploy::cli::cluster_status;
using ::testing::HasSubstr;
using ::testing::Not;

actors::node_report busy_report() {
  actors::node_report report;
  report.transfers_done = 12;
  report.links.push_back(
      {"prefill-0", 0xfedcba9876543210, "shm", "same host", "up", 1, 5, 7, 2, 3});
  report.transfers.push_back(
      {0x00000000000000ab, "r\033[2J1", "prefill-0", "receive", "moving", 4096, 250});
  report.pool.blocks_total = 512;
  report.pool.blocks_free = 500;
  report.pool.blocks_quarantined = 4;
  return report;
}

cluster_status one_node(actors::node_state state, result<actors::node_report> report) {
  cluster_status status;
  status.supervisor = "127.0.0.1:7400";
  status.members.cluster = "c";
  status.members.epoch = 9;
  actors::member member;
  member.node.name = "decode-0";
  member.node.role = static_cast<std::uint8_t>(actors::node_role::decode);
  member.state = static_cast<std::uint8_t>(state);
  status.nodes.push_back({member, true, std::move(report)});
  return status;
}

std::string tables_of(const cluster_status& status) {
  std::ostringstream out;
  print_tables(status, out);
  return out.str();
}

TEST(status_report, tables_show_links_with_the_reason_pools_and_transfers) {
  const auto text = tables_of(one_node(actors::node_state::up, busy_report()));
  for (const auto* word : {"epoch 9", "decode-0", "shm", "same host", "512", "500", "moving",
                           "4.00 KiB", "250 ms", "00000000000000ab"})
    EXPECT_THAT(text, HasSubstr(word));
  EXPECT_THAT(text, Not(HasSubstr("\033")));
}

TEST(status_report, json_says_the_same_with_ids_as_text) {
  const auto json = nlohmann::json::parse(to_json(one_node(actors::node_state::up, busy_report())));
  EXPECT_EQ(json.at("complete"), true);
  const auto& node = json.at("nodes").at(0);
  EXPECT_EQ(node.at("links").at(0).at("peer_incarnation"), "fedcba9876543210");
  EXPECT_EQ(node.at("links").at(0).at("reason"), "same host");
  EXPECT_EQ(node.at("transfers").at(0).at("transfer"), "00000000000000ab");
  EXPECT_EQ(node.at("pool").at("blocks_quarantined"), 4);
}

TEST(status_report, a_node_is_incomplete_unless_it_is_up_and_answered) {
  EXPECT_TRUE(one_node(actors::node_state::up, busy_report()).complete());
  for (const auto state : {actors::node_state::joining, actors::node_state::suspect,
                           actors::node_state::down, actors::node_state::leaving})
    EXPECT_FALSE(one_node(state, busy_report()).complete());
  EXPECT_FALSE(one_node(actors::node_state::up, fail(errc::deadline, "silent")).complete());
}

TEST(status_report, a_node_that_does_not_answer_is_shown_with_the_reason) {
  const auto status = one_node(actors::node_state::suspect, fail(errc::deadline, "it is silent"));
  EXPECT_THAT(tables_of(status), HasSubstr("decode-0: deadline: it is silent"));
  const auto json = nlohmann::json::parse(to_json(status));
  EXPECT_EQ(json.at("nodes").at(0).at("error").at("message"), "it is silent");
  EXPECT_EQ(json.at("nodes").at(0).at("state"), "suspect");
}

TEST(status_report, names_that_are_no_text_and_numbers_that_are_no_state_are_still_json) {
  auto status = one_node(static_cast<actors::node_state>(77), busy_report());
  status.nodes.front().member.node.name = "\xff\xfe";
  status.nodes.front().member.node.role = 99;
  const auto json = nlohmann::json::parse(to_json(status));
  EXPECT_EQ(json.at("nodes").at(0).at("role"), "unknown");
  EXPECT_TRUE(json.at("nodes").at(0).at("state").is_null());
  EXPECT_THAT(tables_of(status), HasSubstr("unknown"));
}

}  // namespace
