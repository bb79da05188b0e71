// Caches with some regions in GPU memory and others in host memory: every backend that copies
// through the host moves them; `xgmi` is left out, with a reason.

#include <algorithm>
#include <optional>

#include <gmock/gmock.h>

#include "gpu_ways.hpp"

namespace troupe::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using transport::xgmi::gpu_site;

constexpr std::uint32_t split_layers = 4;
constexpr std::uint32_t split_tokens = 100;
constexpr std::uint64_t split_seed = 9;

/// For the region of each layer, its GPU; empty if it is on the host.
using places = std::vector<std::optional<std::uint32_t>>;

/// Together, the two cover each way in which bytes may go between GPUs and the host.
const places prefill_places{0, 0, std::nullopt, std::nullopt};
const places decode_places{1, std::nullopt, 1, std::nullopt};
const auto prefill_split = "region 0 in memory of gpu:0 and region 2 in that of the host";
const auto decode_split = "region 0 in memory of gpu:1 and region 1 in that of the host";

kvcache::cache_layout one_region_per_layer() {
  kvcache::cache_shape shape;
  shape.layers = kvcache::attention_layers(split_layers, 4, 64);
  shape.dtype = "fp16";
  shape.blocks = 32;
  return kvcache::make_layout(shape,
                              {kvcache::block_order::layers_first, kvcache::kv_placement::separate,
                               kvcache::block_inner::token_major, kvcache::region_use::per_layer})
      .value();
}

const std::vector<block_id> prefill_blocks{{7}, {8}, {31}, {0}, {17}, {12}, {13}};
const std::vector<block_id> decode_blocks{{20}, {3}, {4}, {5}, {30}, {1}, {9}};

/// A node whose cache has a region of engine memory for each layer.
class placed_cache {
 public:
  placed_cache(const cluster& c, const std::string& name, const places& where) {
    auto& gpus = *gpu_site::of_process()->runtime;
    engine_options options;
    options.layout = one_region_per_layer();
    const auto sizes = kvcache::region_sizes(*options.layout);
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      if (where.at(i)) {
        const auto made = gpus.allocate(*where[i], sizes[i]);
        if (!made) continue;
        on_gpus_.emplace_back(*where[i], *made);
        options.regions.emplace_back(*made, sizes[i]);
      } else {
        on_host_.emplace_back(sizes[i]);
        options.regions.emplace_back(on_host_.back());
      }
    }
    cluster::quiet(name);
    node_ = c.start(name, std::move(options));
  }
  ~placed_cache() {
    if (node_) node_->stop();
    node_.reset();
    for (const auto& [gpu, base] : on_gpus_) gpu_site::of_process()->runtime->release(gpu, base);
  }
  placed_cache(const placed_cache&) = delete;
  placed_cache& operator=(const placed_cache&) = delete;
  [[nodiscard]] engine* node() const { return node_.get(); }

 private:
  std::vector<std::vector<std::byte>> on_host_;
  std::vector<std::pair<std::uint32_t, std::byte*>> on_gpus_;
  std::unique_ptr<engine> node_;
};

/// Serves the prompt once as prefill-0, on an order of the test.
int offer(const cluster& c, const places& where, line_channel& channel) {
  if (!channel.order()) return 0;
  const placed_cache placed{c, "prefill-0", where};
  if (placed.node() == nullptr) return 1;
  engine& node = *placed.node();
  cache_bytes{node}.fill(prefill_blocks, 0, split_layers, 0, split_tokens, split_seed);
  const auto send = node.send({"r", prefill_blocks});
  if (!send || !node.layers_ready(*send, 0, split_layers, split_tokens) ||
      !node.seal(*send, split_tokens))
    return 2;
  channel.say("up");
  (void)channel.order();
  return 0;
}

class split_cache : public ::testing::Test {
 protected:
  void SetUp() override {
    if (have_verbs()) GTEST_SKIP() << "the doubles are for machines without devices";
    if (const auto why = why_memory_is_out_of_reach()) GTEST_SKIP() << *why;
  }

  actors::link_report link;
  std::string device;
  std::size_t differing{0};

  /// Receives the whole prompt. Returns how the receive ended.
  std::string take(const cluster_options& options, const std::string& mode, const places& theirs,
                   const places& ours) {
    const cluster c{unhurried(options)};
    forked prefill{[&](line_channel& channel) { return offer(c, theirs, channel); }};
    const placed_cache placed{c, "decode-0", ours};
    prefill.channel().say("begin");
    if (placed.node() == nullptr || prefill.channel().hear() != "up") return "not up";
    engine& node = *placed.node();
    cache_bytes cache{node};
    cache.poison();
    listener events{node};
    const auto id = node.receive(
        {"r", {"prefill-0"}, mode_of({options.backend, mode}), split_tokens, 0, decode_blocks});
    if (!id) return to_string(id.error());
    if (!events.unpinned(*id)) return "no end";
    if (events.of(*id).failed > 0) return to_string(events.of(*id).why);
    differing = cache.differing(decode_blocks, 0, split_tokens, split_seed);
    const auto report = node.report();
    if (!report.links.empty()) link = report.links.front();
    device = report.pool.device;
    return "done";
  }
};

class moved_split_cache : public split_cache, public ::testing::WithParamInterface<way> {};

TEST_P(moved_split_cache, goes_whole_by_way_of_the_host) {
  const auto& how = GetParam();
  ASSERT_EQ(take(options_of(how), how.mode, prefill_places, decode_places), "done");
  EXPECT_EQ(differing, 0u);
  EXPECT_EQ(link.backend, how.backend) << link.reason;
  EXPECT_EQ(device, "gpu and cpu");
}

std::vector<way> ways_by_the_host() {
  auto ways = gpu_ways();
  std::erase_if(ways, [](const way& w) { return w.backend == "xgmi"; });
  for (auto& w : ways) w.on_gpus = false;
  return ways;
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(moved_split_cache);
INSTANTIATE_TEST_SUITE_P(over, moved_split_cache, ::testing::ValuesIn(ways_by_the_host()), name_of);

TEST_F(split_cache, is_joined_by_auto_with_the_next_backend_which_says_why_it_is_not_xgmi) {
  ASSERT_EQ(take({}, "write", prefill_places, decode_places), "done");
  EXPECT_EQ(differing, 0u);
  EXPECT_EQ(link.backend, "shm") << link.reason;
  EXPECT_THAT(link.reason,
              HasSubstr(std::string{"xgmi: the cache of decode-0 has "} + decode_split));
}

TEST_F(split_cache, of_the_peer_alone_is_found_out_by_it_and_joined_by_the_next_backend) {
  ASSERT_EQ(take({}, "write", prefill_places, {1, 1, 1, 1}), "done");
  EXPECT_EQ(differing, 0u);
  EXPECT_EQ(link.backend, "shm") << link.reason;
  EXPECT_THAT(link.reason, HasSubstr(std::string{"the cache of prefill-0 has "} + prefill_split));
}

TEST_F(split_cache, is_refused_by_xgmi_alone_with_what_is_where_and_what_to_do) {
  cluster_options options;
  options.backend = "xgmi";
  EXPECT_THAT(take(options, "write", prefill_places, decode_places),
              AllOf(HasSubstr("peer_unreachable"), HasSubstr(decode_split),
                    HasSubstr("register each region in memory of a GPU, or use shm, rdma or tcp")));
}

}  // namespace
}  // namespace troupe::testing
