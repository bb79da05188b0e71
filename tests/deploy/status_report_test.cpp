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
  report.operations_open = 4711;
  report.waiting_for_link = 815;
  report.links.push_back({"prefill-0",
                          0xfedcba9876543210,
                          "shm",
                          "same host",
                          "up",
                          1,
                          5,
                          7,
                          2,
                          3,
                          6,
                          "no answer",
                          1009,
                          1006,
                          1,
                          {}});
  report.backends = {{"xgmi", 0, "GPU 0000:1b:00.0 is l\033ost; restart the node"},
                     {"shm", 1, "memfd works here"},
                     {"rdma", 0, "no RDMA device; install one"},
                     {"tcp", 1, "listens"}};
  report.transfers.push_back(
      {0x00000000000000ab, "r\033[2J1", "prefill-0", "receive", "moving", 4096, 250});
  report.pool.blocks_total = 512;
  report.pool.blocks_free = 500;
  report.pool.blocks_quarantined = 4;
  report.pool.memory = "huge pages of 2 MiB, NUMA node 1\033";
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
  for (const auto* word :
       {"epoch 9", "decode-0", "shm", "same host", "512", "500", "moving", "4.00 KiB", "250 ms",
        "00000000000000ab", "no answer", "huge pages of 2 MiB, NUMA node 1\\x1b"})
    EXPECT_THAT(text, HasSubstr(word));
  EXPECT_THAT(text, Not(HasSubstr("\033")));
}

TEST(status_report, json_says_the_same_with_ids_as_text) {
  const auto json = nlohmann::json::parse(to_json(one_node(actors::node_state::up, busy_report())));
  EXPECT_EQ(json.at("complete"), true);
  const auto& node = json.at("nodes").at(0);
  EXPECT_EQ(node.at("links").at(0).at("peer_incarnation"), "fedcba9876543210");
  EXPECT_EQ(node.at("links").at(0).at("reason"), "same host");
  EXPECT_EQ(node.at("links").at(0).at("rebuilds"), 6);
  EXPECT_EQ(node.at("links").at(0).at("last_break"), "no answer");
  EXPECT_EQ(node.at("transfers").at(0).at("transfer"), "00000000000000ab");
  EXPECT_EQ(node.at("pool").at("blocks_quarantined"), 4);
  EXPECT_EQ(node.at("pool").at("memory"), "huge pages of 2 MiB, NUMA node 1\033");
}

TEST(status_report, both_show_what_is_open_and_what_became_of_a_links_batches) {
  const auto status = one_node(actors::node_state::up, busy_report());
  const auto text = tables_of(status);
  for (const auto* word : {"4711", "815", "1009", "1006"}) EXPECT_THAT(text, HasSubstr(word));
  const auto node = nlohmann::json::parse(to_json(status)).at("nodes").at(0);
  EXPECT_EQ(node.at("operations_open"), 4711);
  EXPECT_EQ(node.at("waiting_for_link"), 815);
  EXPECT_EQ(node.at("links").at(0).at("posted"), 1009);
  EXPECT_EQ(node.at("links").at(0).at("completed"), 1006);
  EXPECT_EQ(node.at("links").at(0).at("failed"), 1);
}

TEST(status_report, both_show_which_backends_a_node_can_use_and_why_not_the_others) {
  auto status = one_node(actors::node_state::up, busy_report());
  const auto text = tables_of(status);
  EXPECT_THAT(text,
              HasSubstr("decode-0     shm, tcp  xgmi: GPU 0000:1b:00.0 is l\\x1bost; rdma: no RDMA "
                        "device\n"));
  const auto all = nlohmann::json::parse(to_json(status)).at("nodes").at(0).at("backends");
  ASSERT_EQ(all.size(), 4u);
  EXPECT_EQ(all.at(0).at("name"), "xgmi");
  EXPECT_EQ(all.at(0).at("usable"), false);
  EXPECT_EQ(all.at(0).at("reason"), "GPU 0000:1b:00.0 is l\033ost; restart the node");
  EXPECT_EQ(all.at(3).at("usable"), true);
  status.nodes[0].report->backends.pop_back();
  status.nodes[0].report->backends.erase(status.nodes[0].report->backends.begin() + 1);
  EXPECT_THAT(tables_of(status), HasSubstr("decode-0     none    xgmi: "));
}

TEST(status_report, lanes_that_are_queue_pairs_are_shown_with_their_device_and_others_not) {
  auto report = busy_report();
  EXPECT_THAT(tables_of(one_node(actors::node_state::up, report)), Not(HasSubstr("DEVICE  PORT")));
  report.links[0].by_lane = {{"mlx5_0", 1, 3, "::ffff:10.0.0.1", 321, 320, 2048, 0, 17, 5, 2003},
                             {"mlx5_\033[2J", 2, 1, "::ffff:10.0.1.1", 7, 7, 0, 1, 0, 0, -1}};
  const auto status = one_node(actors::node_state::up, report);
  const auto text = tables_of(status);
  for (const auto* word : {"mlx5_0", "3 ::ffff:10.0.0.1", "321", "320", "2.00 KiB", "17, is down",
                           "PORT RETRIES", "2003", "not counted"})
    EXPECT_THAT(text, HasSubstr(word));
  EXPECT_THAT(text, Not(HasSubstr("\033")));
  const auto json = nlohmann::json::parse(to_json(status));
  const auto& lanes = json.at("nodes").at(0).at("links").at(0).at("by_lane");
  ASSERT_EQ(lanes.size(), 2u);
  EXPECT_EQ(lanes.at(0).at("device"), "mlx5_0");
  EXPECT_EQ(lanes.at(0).at("gid_index"), 3);
  EXPECT_EQ(lanes.at(0).at("requests_posted"), 321);
  EXPECT_EQ(lanes.at(0).at("port_up"), false);
  EXPECT_EQ(lanes.at(0).at("port_downs"), 17);
  EXPECT_EQ(lanes.at(0).at("port_changes"), 5);
  EXPECT_EQ(lanes.at(0).at("port_retries"), 2003);
  EXPECT_TRUE(lanes.at(1).at("port_retries").is_null()) << "0 would say that there were none";
  EXPECT_EQ(lanes.at(1).at("port"), 2);
  EXPECT_EQ(lanes.at(1).at("port_up"), true);
}

TEST(status_report, both_show_what_a_node_of_an_open_stage_announced_and_nothing_of_other_nodes) {
  auto status = one_node(actors::node_state::up, busy_report());
  EXPECT_THAT(tables_of(status), Not(HasSubstr("JOINED")));
  const auto named = nlohmann::json::parse(to_json(status)).at("nodes").at(0);
  for (const auto* key : {"replica_name", "fingerprint", "labels"})
    EXPECT_FALSE(named.contains(key)) << key;
  auto& node = status.nodes.front().member.node;
  node.name = "engines.a.0";
  node.role = static_cast<std::uint8_t>(actors::node_role::both);
  node.replica_name = "a";
  node.fingerprint[1] = 0x01;
  node.fingerprint[2] = 0xfe;
  node.labels.push_back({"http", "10.0.0.1:8000"});
  node.labels.push_back({"i\033d", "\033[2Jx"});
  const auto text = tables_of(status);
  for (const auto* word : {"engines.a.0", "both", "0001fe00000000000000000000000000",
                           "http=10.0.0.1:8000, i\\x1bd=\\x1b[2Jx"})
    EXPECT_THAT(text, HasSubstr(word));
  EXPECT_THAT(text, Not(HasSubstr("\033")));
  const auto joined = nlohmann::json::parse(to_json(status)).at("nodes").at(0);
  EXPECT_EQ(joined.at("role"), "both");
  EXPECT_EQ(joined.at("replica_name"), "a");
  EXPECT_EQ(joined.at("fingerprint"), "0001fe00000000000000000000000000");
  EXPECT_EQ(joined.at("labels").size(), 2u);
  EXPECT_EQ(joined.at("labels").at("http"), "10.0.0.1:8000");
}

TEST(status_report, a_node_that_joined_without_a_cache_or_labels_has_none_in_either) {
  auto status = one_node(actors::node_state::up, busy_report());
  status.nodes.front().member.node.replica_name = "store-1";
  EXPECT_THAT(tables_of(status), HasSubstr("store-1       -            -\n"));
  const auto node = nlohmann::json::parse(to_json(status)).at("nodes").at(0);
  EXPECT_EQ(node.at("replica_name"), "store-1");
  for (const auto* key : {"fingerprint", "labels"}) EXPECT_FALSE(node.contains(key)) << key;
}

TEST(status_report, json_says_how_many_receives_wait_for_a_request_by_peer) {
  auto report = busy_report();
  report.parked.push_back({"engines.b.0", 17});
  const auto node =
      nlohmann::json::parse(to_json(one_node(actors::node_state::up, report))).at("nodes").at(0);
  ASSERT_EQ(node.at("parked").size(), 1u);
  EXPECT_EQ(node.at("parked").at(0).at("peer"), "engines.b.0");
  EXPECT_EQ(node.at("parked").at(0).at("receives"), 17);
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
