#include "troupe/config/parse.hpp"

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "troupe/config/print.hpp"

namespace troupe::config {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;
using testing::SizeIs;

constexpr std::string_view design_example = R"(cluster: demo
supervisor: {host: 127.0.0.1, port: 7400, heartbeat_interval: 1s, heartbeat_timeout: 5s}
security: {mode: none}            # none: loopback only; tls: certificate, key, ca
model: {layers: 28, kv_heads: 4, head_dim: 128, dtype: bf16, block_tokens: 16}   # or the engine's own
stages:
  - {name: prefill, role: prefill, replicas: 1, tensor_parallel: 1, hosts: [127.0.0.1], pool: {device: cpu, size: 1GiB}}
  - name: decode
    role: decode
    replicas: 2
    policy: least-queue-length    # random | round-robin | least-queue-length
    hosts: [127.0.0.1]
    pool: {device: cpu, size: 1GiB, on_full: wait}
    transport: {backend: auto, fallback: [tcp], device: auto, qp_per_transfer: 4, post_batch_size: -1, num_workers: 1}
edges:
  - {from: prefill, to: decode, mode: write}
)";

constexpr std::string_view least =
    "cluster: c\nstages: [{name: p, role: prefill, engine: external}]\n";

TEST(parse, the_example_of_the_design_gives_what_it_says) {
  const auto outcome = parse(design_example, "demo.yaml");
  ASSERT_TRUE(outcome.value) << to_string(outcome.issues);
  const auto& value = *outcome.value;
  EXPECT_EQ(value.cluster, "demo");
  EXPECT_EQ(value.supervisor.port, 7400);
  EXPECT_EQ(value.supervisor.heartbeat_timeout, milliseconds{5000});
  ASSERT_TRUE(value.model);
  EXPECT_EQ(value.model->layers, 28U);
  EXPECT_EQ(value.model->dtype, "bf16");
  ASSERT_THAT(value.stages, SizeIs(2));
  EXPECT_EQ(value.stages[0].pool->size, std::uint64_t{1} << 30U);
  EXPECT_EQ(value.stages[0].policy, placement_policy::round_robin);
  EXPECT_EQ(value.stages[1].replicas, 2U);
  EXPECT_EQ(value.stages[1].policy, placement_policy::least_queue_length);
  EXPECT_THAT(value.stages[1].transport.fallback, testing::ElementsAre(backend_kind::tcp));
  ASSERT_THAT(value.edges, SizeIs(1));
  EXPECT_EQ(value.edges[0].mode, transfer_mode::write);
}

TEST(parse, what_a_file_leaves_out_has_the_documented_default) {
  const auto outcome = parse(least, "least.yaml");
  ASSERT_TRUE(outcome.value) << to_string(outcome.issues);
  deployment expected;
  expected.cluster = "c";
  stage_config stage;
  stage.name = "p";
  stage.engine = engine_kind::external;
  stage.ports = {0};
  expected.stages = {stage};
  EXPECT_EQ(*outcome.value, expected);
  EXPECT_EQ(expected.supervisor.heartbeat_interval, milliseconds{1000});
  EXPECT_EQ(expected.supervisor.ease_in, milliseconds{10'000});
}

TEST(parse, a_stage_takes_the_layout_of_the_model_key_by_key) {
  const auto outcome = parse(
      "cluster: c\n"
      "model: {layers: 2, kv_heads: 2, head_dim: 8, layout: {order: blocks_first, kv: separate}}\n"
      "stages:\n"
      "  - {name: p, role: prefill, engine: external, layout: {kv: together}}\n"
      "  - {name: d, role: decode, engine: external}\n",
      "f");
  ASSERT_TRUE(outcome.value) << to_string(outcome.issues);
  EXPECT_EQ(outcome.value->stages[0].layout,
            (cache_arrangement{block_order::blocks_first, kv_placement::together, {}}));
  EXPECT_EQ(outcome.value->stages[1].layout, outcome.value->model->layout);
}

TEST(parse, hosts_may_be_anywhere_once_who_connects_shows_a_certificate) {
  const auto outcome = parse(
      "cluster: c\nsupervisor: {host: node-a.example.org}\n"
      "security: {mode: tls, secret: /s, certificate: /c.crt, key: /c.key, ca: /ca.crt}\n"
      "stages: [{name: p, role: prefill, engine: external, hosts: [10.0.0.2]}]\n",
      "f");
  ASSERT_TRUE(outcome.value) << to_string(outcome.issues);
  const security_config expected{security_mode::tls, "/s", "/c.crt", "/c.key", "/ca.crt"};
  EXPECT_EQ(outcome.value->security, expected);
}

TEST(parse, a_secret_needs_no_certificate) {
  const auto outcome =
      parse(std::string{least} + "security: {mode: secret, secret: /etc/troupe/secret}\n", "f");
  ASSERT_TRUE(outcome.value) << to_string(outcome.issues);
  EXPECT_EQ(outcome.value->security.mode, security_mode::secret);
  EXPECT_EQ(outcome.value->security.secret, "/etc/troupe/secret");
}

TEST(parse, without_a_word_on_security_who_connects_has_to_know_the_users_own_secret) {
  for (const auto* said :
       {"", "security: {}\n", "security: {mode: secret}\n", "security: {secret: auto}\n"}) {
    const auto outcome = parse(std::string{least} + said, "f");
    ASSERT_TRUE(outcome.value) << said << to_string(outcome.issues);
    EXPECT_EQ(outcome.value->security.mode, security_mode::secret) << said;
    EXPECT_EQ(outcome.value->security.secret, "auto") << said;
  }
  const auto open = parse(std::string{least} + "security: {mode: none}\n", "f");
  ASSERT_TRUE(open.value) << to_string(open.issues);
  EXPECT_EQ(open.value->security.mode, security_mode::none);
  const auto shared = parse(
      std::string{least} +
          "security: {mode: tls, secret: auto, certificate: /c.crt, key: /c.key, ca: /ca.crt}\n",
      "f");
  EXPECT_FALSE(shared.value) << "hosts have no folder in common";
}

TEST(parse, an_edge_of_layers_is_written_unless_it_says_read_and_others_have_no_mode) {
  const auto outcome = parse(
      "cluster: c\nstages:\n"
      "  - {name: p, role: prefill, engine: external}\n"
      "  - {name: d, role: decode, engine: external}\n"
      "  - {name: s, role: store, pool: {size: 1MiB}}\n"
      "edges: [{from: p, to: d}, {from: d, to: p}, {from: s, to: d}]\n",
      "f");
  ASSERT_TRUE(outcome.value) << to_string(outcome.issues);
  EXPECT_EQ(outcome.value->edges[0].mode, transfer_mode::write);
  EXPECT_EQ(outcome.value->edges[1].mode, std::nullopt);
  EXPECT_EQ(outcome.value->edges[2].mode, std::nullopt);
  EXPECT_EQ(outcome.value->stages[2].engine, engine_kind::none);
}

TEST(parse, an_open_stage_has_no_nodes_of_the_file_and_says_how_many_may_join) {
  const auto outcome = parse(
      "cluster: c\nmodel: {layers: 2, kv_heads: 3, head_dim: 8}\nstages:\n"
      "  - {name: e, role: both, open: {max_nodes: 1000}, policy: random}\n"
      "  - {name: s, role: store, open: {max_nodes: 23}, pool: {size: 1B}}\n",
      "f");
  ASSERT_TRUE(outcome.value) << to_string(outcome.issues);
  const auto& engines = outcome.value->stages[0];
  EXPECT_EQ(engines.role, role::both);
  EXPECT_EQ(engines.open, (open_config{1000}));
  EXPECT_EQ(engines.node_count(), 0U);
  EXPECT_THAT(engines.hosts, testing::ElementsAre("auto"));
  EXPECT_THAT(engines.ports, testing::IsEmpty());
  EXPECT_EQ(engines.policy, placement_policy::random);
  EXPECT_EQ(engines.engine, engine_kind::external);
  EXPECT_EQ(engines.layout, std::nullopt) << "they bring their own, whatever the model is";
  EXPECT_EQ(engines.pool, std::nullopt);
  const auto& store = outcome.value->stages[1];
  EXPECT_EQ(store.engine, engine_kind::none);
  EXPECT_EQ(store.node_count(), 0U);
  EXPECT_EQ(store.pool, (pool_config{.gpus = {}, .size = 1}));
}

TEST(parse, an_open_stage_takes_256_nodes_unless_it_says_another_number) {
  for (const auto* said : {"{}", "{max_nodes: 256}"}) {
    const auto outcome = parse(
        std::string{"cluster: c\nstages: [{name: d, role: decode, open: "} + said + "}]\n", "f");
    ASSERT_TRUE(outcome.value) << to_string(outcome.issues);
    EXPECT_EQ(outcome.value->stages[0].open, open_config{});
    EXPECT_EQ(outcome.value->stages[0].open->max_nodes, 256U);
  }
  const auto closed = parse(least, "f");
  ASSERT_TRUE(closed.value) << to_string(closed.issues);
  EXPECT_EQ(closed.value->stages[0].open, std::nullopt);
}

TEST(parse, a_stage_of_both_may_have_nodes_of_the_file_which_are_held_to_the_model) {
  const std::string head =
      "cluster: c\nmodel: {layers: 2, kv_heads: 2, head_dim: 8}\nstages:\n"
      "  - {name: e, role: both, engine: external, tensor_parallel: ";
  const auto outcome = parse(head + "2}\n", "f");
  ASSERT_TRUE(outcome.value) << to_string(outcome.issues);
  EXPECT_EQ(outcome.value->stages[0].node_count(), 2U);
  EXPECT_EQ(outcome.value->stages[0].layout, outcome.value->model->layout);
  EXPECT_FALSE(parse(head + "3}\n", "f").value);
}

TEST(parse, an_edge_moves_layers_from_a_stage_that_prefills_to_one_that_decodes_or_to_itself) {
  const auto outcome = parse(
      "cluster: c\nstages:\n"
      "  - {name: p, role: prefill, engine: external}\n"
      "  - {name: d, role: decode, engine: external}\n"
      "  - {name: b, role: both, engine: external}\n"
      "  - {name: o, role: both, open: {}}\n"
      "  - {name: s, role: store, open: {}, pool: {size: 1MiB}}\n"
      "edges: [{from: p, to: b}, {from: b, to: d, mode: read}, {from: b, to: o},\n"
      "        {from: o, to: o}, {from: b, to: p}, {from: d, to: o}, {from: o, to: s}]\n",
      "f");
  ASSERT_TRUE(outcome.value) << to_string(outcome.issues);
  std::vector<std::optional<transfer_mode>> modes;
  for (const auto& edge : outcome.value->edges) modes.push_back(edge.mode);
  const std::vector<std::optional<transfer_mode>> expected{
      transfer_mode::write, transfer_mode::read, transfer_mode::write, transfer_mode::write,
      std::nullopt,         std::nullopt,        std::nullopt};
  EXPECT_EQ(modes, expected);
}

TEST(parse, receives_that_nobody_knows_yet_are_4096_of_a_peer_unless_the_file_says_otherwise) {
  const auto silent = parse(least, "f");
  ASSERT_TRUE(silent.value) << to_string(silent.issues);
  EXPECT_EQ(silent.value->limits.max_parked, 4096U);
  const auto with = [](const std::string& most) {
    return parse(std::string{least} + "limits: {max_parked: " + most + "}\n", "f");
  };
  for (const auto* most : {"1", "1048576"}) {
    const auto outcome = with(most);
    ASSERT_TRUE(outcome.value) << to_string(outcome.issues);
    EXPECT_EQ(std::to_string(outcome.value->limits.max_parked), most);
  }
  for (const auto* most : {"0", "1048577"}) EXPECT_FALSE(with(most).value) << most;
}

TEST(parse, a_supervisor_is_begun_by_whoever_needs_it_where_the_file_says_so) {
  const auto silent = parse(least, "f");
  ASSERT_TRUE(silent.value) << to_string(silent.issues);
  EXPECT_FALSE(silent.value->supervisor.begin);
  EXPECT_EQ(silent.value->supervisor.idle, milliseconds{600'000});
  const auto with = [](const std::string& keys) {
    return parse(std::string{least} + "supervisor: {" + keys + "}\n", "f");
  };
  const auto begun = with("begin: true, port: 0, idle: 1s");
  ASSERT_TRUE(begun.value) << to_string(begun.issues);
  EXPECT_TRUE(begun.value->supervisor.begin);
  EXPECT_EQ(begun.value->supervisor.port, 0);
  EXPECT_EQ(begun.value->supervisor.idle, milliseconds{1000});
  const auto not_begun = with("begin: false, idle: 24h");
  ASSERT_TRUE(not_begun.value) << to_string(not_begun.issues);
  EXPECT_FALSE(not_begun.value->supervisor.begin);
  for (const auto* wrong :
       {"begin: yes", "begin: 1", "begin: \"true\"", "begin: [true]", "idle: 999ms", "idle: 25h"})
    EXPECT_FALSE(with(wrong).value) << wrong;
}

TEST(parse, an_alias_stands_for_a_copy_of_what_it_names) {
  const auto outcome = parse(
      "cluster: c\nstages:\n"
      "  - {name: p, role: prefill, engine: external, pool: &pool {size: 2MiB, on_full: fail}}\n"
      "  - {name: d, role: decode, engine: external, pool: *pool}\n",
      "f");
  ASSERT_TRUE(outcome.value) << to_string(outcome.issues);
  EXPECT_EQ(outcome.value->stages[1].pool, outcome.value->stages[0].pool);
  EXPECT_EQ(outcome.value->stages[1].pool->size, std::uint64_t{2} << 20U);
}

TEST(parse, nodes_of_one_stage_may_share_a_port_where_their_addresses_differ) {
  const auto outcome = parse(
      "cluster: c\nstages:\n"
      "  - {name: p, role: prefill, engine: external, replicas: 2, port: 7500,\n"
      "     hosts: [127.0.0.1, 127.0.0.2]}\n",
      "f");
  ASSERT_TRUE(outcome.value) << to_string(outcome.issues);
  EXPECT_THAT(outcome.value->stages[0].ports, testing::ElementsAre(7500, 7500));
}

TEST(parse, nodes_on_automatic_hosts_may_share_a_port_since_nobody_knows_yet_where_they_stand) {
  const auto outcome = parse(
      "cluster: c\nstages:\n"
      "  - {name: p, role: prefill, engine: external, replicas: 4, port: 7500, hosts: [auto]}\n",
      "f");
  ASSERT_TRUE(outcome.value) << to_string(outcome.issues);
  EXPECT_THAT(outcome.value->stages[0].hosts, testing::ElementsAre("auto"));
}

TEST(parse, ranks_may_outnumber_the_heads_if_they_share_them_evenly) {
  const std::string head =
      "cluster: c\nmodel: {layers: 2, kv_heads: 2, head_dim: 8}\nstages:\n"
      "  - {name: d, role: decode, engine: external, tensor_parallel: ";
  EXPECT_TRUE(parse(head + "4}\n", "f").value);
  EXPECT_TRUE(parse(head + "1}\n", "f").value);
  EXPECT_FALSE(parse(head + "3}\n", "f").value);
}

TEST(parse, a_pool_of_exactly_one_block_is_enough_and_a_byte_less_is_not) {
  // 2 (K, V) * 3 layers * 1 of 2 heads * 8 elements * 2 bytes * 4 tokens = 384
  const std::string head =
      "cluster: c\nmodel: {layers: 3, kv_heads: 2, head_dim: 8, block_tokens: 4}\nstages:\n"
      "  - {name: d, role: decode, engine: external, tensor_parallel: 2, pool: {size: ";
  EXPECT_TRUE(parse(head + "384B}}\n", "f").value);
  const auto outcome = parse(head + "383B}}\n", "f");
  ASSERT_THAT(outcome.issues, SizeIs(1));
  EXPECT_EQ(outcome.issues[0].key, "stages[0].pool.size");
  EXPECT_EQ(outcome.issues[0].expected, "at least 384B");
}

TEST(parse, a_pool_of_a_part_holds_a_block_of_its_layers) {
  // 2 (K, V) * 2 of 3 layers * 2 heads * 8 elements * 2 bytes * 4 tokens = 512
  const std::string head =
      "cluster: c\nmodel: {layers: 3, kv_heads: 2, head_dim: 8, block_tokens: 4}\nstages:\n"
      "  - {name: d, role: decode, engine: external, pipeline_parallel: 2, pool: {size: ";
  const auto enough = parse(head + "512B}}\n", "f");
  ASSERT_TRUE(enough.value) << to_string(enough.issues);
  EXPECT_EQ(enough.value->stages[0].node_count(), 2U);
  const auto outcome = parse(head + "511B}}\n", "f");
  ASSERT_THAT(outcome.issues, SizeIs(1));
  EXPECT_EQ(outcome.issues[0].key, "stages[0].pool.size");
  EXPECT_EQ(outcome.issues[0].expected, "at least 512B");
}

TEST(parse, the_layers_of_a_model_are_divided_evenly_and_completely) {
  for (const std::uint32_t layers : {1U, 2U, 5U, 28U, 61U}) {
    for (std::uint32_t parts = 1; parts <= layers; ++parts) {
      std::uint32_t next = 0;
      for (std::uint32_t part = 0; part < parts; ++part) {
        const auto held = layers_of_part(layers, parts, part);
        EXPECT_EQ(held.first, next);
        EXPECT_GE(held.count, layers / parts);
        EXPECT_LE(held.count, (layers + parts - 1) / parts);
        next = held.first + held.count;
      }
      EXPECT_EQ(next, layers);
    }
  }
}

TEST(parse, an_issue_names_file_line_column_key_what_was_found_and_what_was_expected) {
  const auto outcome =
      parse("cluster: c\nsupervisor:\n  port: seven\n" + std::string{least.substr(11)}, "a/b.yaml");
  ASSERT_THAT(outcome.issues, SizeIs(1));
  const issue expected{
      "a/b.yaml", 3, 9, "supervisor.port", "`seven`", "a whole number from 0 to 65535", ""};
  EXPECT_EQ(outcome.issues[0], expected);
  EXPECT_EQ(
      to_string(expected),
      "a/b.yaml:3: key `supervisor.port`: found `seven`, expected a whole number from 0 to 65535");
}

TEST(parse, the_list_of_issues_is_bounded_and_says_that_there_are_more) {
  std::string text{least};
  for (int i = 0; i < 5000; ++i) text += "unknown_" + std::to_string(i) + ": 1\n";
  const auto outcome = parse(text, "f");
  ASSERT_THAT(outcome.issues, SizeIs(max_issues + 1));
  EXPECT_THAT(outcome.issues.back().message, HasSubstr("more is wrong"));
}

TEST(parse, a_long_value_is_shortened_in_the_message) {
  const auto outcome =
      parse("cluster: " + std::string(10'000, 'X') + "\n" + std::string{least.substr(11)}, "f");
  ASSERT_THAT(outcome.issues, SizeIs(1));
  EXPECT_LT(to_string(outcome.issues[0]).size(), 300U);
}

TEST(load, a_file_that_cannot_be_read_is_an_issue_with_the_reason) {
  const auto missing = load("/nonexistent/demo.yaml");
  ASSERT_THAT(missing.issues, SizeIs(1));
  EXPECT_EQ(to_string(missing.issues[0]),
            "/nonexistent/demo.yaml: cannot be read: No such file or directory");
  const auto folder = load("/");
  ASSERT_THAT(folder.issues, SizeIs(1));
  EXPECT_EQ(to_string(folder.issues[0]), "/: cannot be read: Is a directory");
}

TEST(load, a_file_without_end_is_refused_after_a_bounded_read) {
  const auto outcome = load("/dev/zero");
  ASSERT_THAT(outcome.issues, SizeIs(1));
  EXPECT_THAT(outcome.issues[0].message, HasSubstr("larger than 1 MiB"));
}

}  // namespace
}  // namespace troupe::config
