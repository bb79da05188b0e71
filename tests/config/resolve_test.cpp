#include "troupe/config/resolve.hpp"

#include <set>
#include <string>

#include <gtest/gtest.h>

namespace troupe::config {
namespace {

stage_config stage(std::string name, std::uint32_t replicas, std::uint32_t ranks) {
  stage_config result;
  result.name = std::move(name);
  result.replicas = replicas;
  result.tensor_parallel = ranks;
  result.ports.assign(result.node_count(), 0);
  return result;
}

TEST(resolve, nodes_come_supervisor_first_then_by_stage_replica_and_rank) {
  deployment value;
  value.stages = {stage("p", 1, 1), stage("d", 2, 2)};
  value.stages[1].role = role::decode;
  value.stages[1].ports = {1, 2, 3, 4};
  const auto nodes = resolve(value, {});
  ASSERT_EQ(nodes.size(), 6U);
  EXPECT_EQ(nodes[0].name, "supervisor");
  EXPECT_EQ(nodes[0].role, role::supervisor);
  EXPECT_EQ(nodes[0].port, 7400);
  EXPECT_FALSE(nodes[0].stage_index);
  const auto& last = nodes[5];
  EXPECT_EQ(last.name, "d-1-tp1");
  EXPECT_EQ(last.stage, "d");
  EXPECT_EQ(last.stage_index, 1U);
  EXPECT_EQ(last.role, role::decode);
  EXPECT_EQ(last.replica, 1U);
  EXPECT_EQ(last.rank, 1U);
  EXPECT_EQ(last.tensor_parallel, 2U);
  EXPECT_EQ(last.port, 4);
  EXPECT_EQ(nodes[3].port, 2);
}

TEST(resolve, the_ranks_of_a_pipeline_are_numbered_part_by_part) {
  deployment value;
  value.stages = {stage("p", 2, 2), stage("d", 1, 1)};
  value.stages[0].pipeline_parallel = 3;
  value.stages[0].ports.assign(value.stages[0].node_count(), 0);
  value.stages[0].ports[9] = 77;
  value.stages[1].pipeline_parallel = 2;
  value.stages[1].ports = {0, 0};
  const auto nodes = resolve(value, {});
  ASSERT_EQ(nodes.size(), 1U + 12 + 2);
  const auto& one = nodes[1 + 9];
  EXPECT_EQ(one.name, "p-1-pp1-tp1");
  EXPECT_EQ(one.replica, 1U);
  EXPECT_EQ(one.rank, 3U);
  EXPECT_EQ(one.ranks(), 6U);
  EXPECT_EQ(one.tensor_parallel, 2U);
  EXPECT_EQ(one.pipeline_parallel, 3U);
  EXPECT_EQ(one.port, 77);
  EXPECT_EQ(nodes.back().name, "d-0-pp1");
  EXPECT_EQ(nodes.back().rank, 1U);
}

TEST(resolve, the_ranks_of_a_replica_share_a_host_unless_each_node_has_its_own) {
  auto two = stage("d", 3, 2);
  two.hosts = {"a", "b"};
  EXPECT_EQ(host_of(two, 0, 1), "a");
  EXPECT_EQ(host_of(two, 1, 0), "b");
  EXPECT_EQ(host_of(two, 2, 1), "a");
  auto own = stage("d", 2, 2);
  own.hosts = {"a", "b", "c", "d"};
  EXPECT_EQ(host_of(own, 0, 1), "b");
  EXPECT_EQ(host_of(own, 1, 0), "c");
}

TEST(resolve, a_node_is_local_by_loopback_or_by_an_address_of_this_machine) {
  deployment value;
  value.supervisor.host = "Node-A";
  value.stages = {stage("p", 3, 1)};
  value.stages[0].hosts = {"10.0.0.7", "127.0.0.9", "10.0.0.8", "auto"};
  value.stages[0].replicas = 4;
  const auto nodes = resolve(value, {"node-a", "10.0.0.7"});
  EXPECT_TRUE(nodes[0].local);
  EXPECT_TRUE(nodes[1].local);
  EXPECT_TRUE(nodes[2].local);
  EXPECT_FALSE(nodes[3].local);
  EXPECT_TRUE(nodes[4].local) << "auto is wherever it is started";
}

TEST(resolve, an_open_stage_has_no_nodes_and_those_of_later_stages_know_their_own) {
  deployment value;
  value.stages = {stage("e", 3, 2), stage("d", 1, 1)};
  value.stages[0].role = role::both;
  value.stages[0].open = open_config{};
  const auto nodes = resolve(value, {});
  ASSERT_EQ(nodes.size(), 2U);
  EXPECT_EQ(nodes[1].name, "d-0");
  EXPECT_EQ(nodes[1].stage_index, 1U);
}

TEST(resolve, names_that_look_like_nodes_of_another_stage_stay_apart) {
  deployment value;
  for (const auto* name : {"d", "d-0", "d-0-tp1", "d-1", "d-tp0", "tp0"}) {
    value.stages.push_back(stage(name, 3, 1));
    value.stages.push_back(stage(std::string{name} + "x", 3, 2));
  }
  value.stages.push_back(stage("dd", 2, 3));
  value.stages.push_back(stage("dd-0", 2, 1));
  for (const auto* name : {"e", "e-0", "e-0-pp1", "e-pp0"}) {
    value.stages.push_back(stage(name, 2, 1));
    value.stages.push_back(stage(std::string{name} + "x", 2, 2));
    for (auto* of : {&value.stages.back(), &value.stages[value.stages.size() - 2]}) {
      of->pipeline_parallel = 2;
      of->ports.assign(of->node_count(), 0);
    }
  }
  std::set<std::string> names;
  const auto nodes = resolve(value, {});
  for (const auto& node : nodes) EXPECT_TRUE(names.insert(node.name).second) << node.name;
  EXPECT_EQ(find_node(nodes, "dd-1-tp2")->rank, 2U);
  EXPECT_EQ(find_node(nodes, "nobody"), nullptr);
}

}  // namespace
}  // namespace troupe::config
