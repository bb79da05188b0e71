#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "troupe/config/parse.hpp"
#include "troupe/config/print.hpp"
#include "troupe/config/resolve.hpp"

namespace troupe::config {
namespace {

const std::string folder = TROUPE_SOURCE_DIR "/deploy/examples/";

std::vector<std::string> node_names(const deployment& of) {
  std::vector<std::string> names;
  for (const auto& node : resolve(of, {})) names.push_back(node.name);
  return names;
}

TEST(examples, each_one_is_accepted_and_survives_printing) {
  std::size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator{folder}) {
    if (entry.path().extension() != ".yaml") continue;
    ++count;
    const auto outcome = load(entry.path().string());
    ASSERT_TRUE(outcome.value) << to_string(outcome.issues);
    const auto again = parse(print(*outcome.value), "printed");
    ASSERT_TRUE(again.value) << to_string(again.issues);
    EXPECT_EQ(*again.value, *outcome.value);
    // The examples promise that everything runs on the machine that starts them.
    for (const auto& node : resolve(*outcome.value, {})) EXPECT_TRUE(node.local) << node.name;
  }
  EXPECT_GE(count, 3U);
}

TEST(examples, the_quick_start_is_one_prefill_and_one_decode) {
  const auto value = load(folder + "quickstart.yaml").value;
  ASSERT_TRUE(value);
  EXPECT_EQ(node_names(*value), (std::vector<std::string>{"supervisor", "prefill-0", "decode-0"}));
}

TEST(examples, hetero_tp_feeds_two_ranks_from_one) {
  const auto value = load(folder + "hetero-tp.yaml").value;
  ASSERT_TRUE(value);
  EXPECT_EQ(node_names(*value),
            (std::vector<std::string>{"supervisor", "prefill-0", "decode-0-tp0", "decode-0-tp1"}));
  EXPECT_EQ(value->edges.at(0).mode, transfer_mode::read);
  EXPECT_NE(value->stages[0].layout, value->stages[1].layout);
}

TEST(examples, the_one_with_gpus_gives_each_rank_its_own) {
  const auto value = load(folder + "gpu.yaml").value;
  ASSERT_TRUE(value);
  std::vector<std::uint32_t> gpus;
  for (const auto& stage : value->stages) {
    EXPECT_EQ(stage.transport.backend, backend_kind::xgmi);
    gpus.insert(gpus.end(), stage.pool->gpus.begin(), stage.pool->gpus.end());
  }
  EXPECT_EQ(gpus, (std::vector<std::uint32_t>{0, 1, 2, 3}));
}

TEST(examples, the_store_runs_no_engine_and_its_edges_move_no_layers) {
  const auto value = load(folder + "store.yaml").value;
  ASSERT_TRUE(value);
  const auto nodes = resolve(*value, {});
  const auto* store = find_node(nodes, "cache-0");
  ASSERT_NE(store, nullptr);
  EXPECT_EQ(store->role, role::store);
  EXPECT_EQ(store->engine, engine_kind::none);
  EXPECT_EQ(std::count_if(value->edges.begin(), value->edges.end(),
                          [](const auto& edge) { return edge.mode.has_value(); }),
            1);
}

}  // namespace
}  // namespace troupe::config
