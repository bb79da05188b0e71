// Caches in a layout of the engine's own, in memory that Troupe allocates for it: a region for each
// layer, keys and values apart.

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>

#include <gmock/gmock.h>
#include <unistd.h>

#include "cache_bytes.hpp"
#include "hidden_memory.hpp"
#include "ways.hpp"

namespace troupe::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr std::uint32_t layers = 2;
constexpr std::uint32_t tokens = 100;

/// A region has 4,096,000 bytes: it fits in two huge pages of 2 MiB and does not fill them.
kvcache::cache_layout layout_with(std::uint32_t blocks) {
  kvcache::cache_shape shape;
  shape.layers = kvcache::attention_layers(layers, 4, 64);
  shape.dtype = "fp16";
  shape.blocks = blocks;
  return kvcache::make_layout(shape,
                              {kvcache::block_order::layers_first, kvcache::kv_placement::separate,
                               kvcache::block_inner::head_major, kvcache::region_use::per_layer})
      .value();
}

engine_options allocated(kvcache::cache_layout layout = layout_with(250)) {
  engine_options options;
  options.layout = std::move(layout);
  options.allocate.emplace();
  return options;
}

std::vector<block_id> blocks_of(bool prefill) {
  if (prefill) return {{7}, {8}, {249}, {0}, {17}, {100}, {101}};
  return {{200}, {3}, {4}, {5}, {248}, {1}, {99}};
}

/// Serves the prompt once as prefill-0, in a process that is `prepared`.
int offer(const cluster& c, const std::function<bool()>& prepared, line_channel& channel) {
  if (!channel.order()) return 0;
  if (!prepared()) return 1;
  cluster::quiet("prefill-0");
  const auto node = c.start("prefill-0", allocated());
  if (!node) return 2;
  cache_bytes{*node}.fill(blocks_of(true), 0, layers, 0, tokens, 7);
  listener events{*node};
  const auto send = node->send({"r", blocks_of(true)});
  if (!send || !node->layers_ready(*send, 0, layers, tokens) || !node->seal(*send, tokens))
    return 3;
  const bool ended = events.unpinned(*send);
  const auto links = node->report().links;
  channel.say(ended && !links.empty() ? links.front().backend : "no end");
  (void)channel.order();
  return 0;
}

/// The prompt arrives at decode-0, and both sides report `backend`.
void expect_arrival(const cluster& c, forked& prefill, const way& how) {
  cluster::quiet("decode-0");
  const auto node = c.start("decode-0", allocated());
  ASSERT_TRUE(node);
  prefill.channel().say("go");
  cache_bytes cache{*node};
  cache.poison();
  listener events{*node};
  const auto receive =
      node->receive({"r", {"prefill-0"}, mode_of(how), tokens, 0, blocks_of(false)});
  ASSERT_TRUE(receive) << to_string(receive.error());
  ASSERT_TRUE(events.unpinned(*receive));
  EXPECT_EQ(events.of(*receive).done, 1) << to_string(events.of(*receive).why);
  EXPECT_EQ(cache.differing(blocks_of(false), 0, tokens, 7), 0U);
  const auto links = node->report().links;
  ASSERT_EQ(links.size(), 1U);
  EXPECT_EQ(links.front().backend, how.backend) << links.front().reason;
  EXPECT_EQ(prefill.channel().hear().value_or("silence"), how.backend);
}

class allocated_cache : public ::testing::TestWithParam<way> {};

TEST_P(allocated_cache, of_a_layout_of_the_engines_own_moves_every_byte) {
  const cluster c{unhurried(options_of(GetParam()))};
  forked prefill{[&](line_channel& channel) {
    return offer(
        c, [] { return true; }, channel);
  }};
  expect_arrival(c, prefill, GetParam());
}

INSTANTIATE_TEST_SUITE_P(over, allocated_cache, ::testing::ValuesIn(every_way()), name_of);

TEST(allocated_cache_of_one_host, is_mapped_by_shm_where_the_peer_may_not_reach_this_process) {
  forked trial{[](line_channel& channel) {
    if (!channel.order()) return 0;
    channel.say(give_up_rights() && !reaches_parent() ? "yes" : "no");
    return 0;
  }};
  for (const auto* mode : {"write", "read"}) {
    const cluster c{unhurried(options_of({"shm", mode}))};
    forked prefill{[&](line_channel& channel) { return offer(c, give_up_rights, channel); }};
    const hidden_memory no_longer_reached;
    if (std::string{mode} == "write") {
      trial.channel().say("try");
      if (trial.channel().hear() != "yes")
        GTEST_SKIP() << "this process cannot hide its memory from another one";
    }
    expect_arrival(c, prefill, {"shm", mode});
  }
}

TEST(allocated_cache_memory, is_zeroed_begins_with_a_page_and_stays_until_the_engine_is_destroyed) {
  const cluster c{unhurried()};
  cluster::quiet("decode-0");
  const auto layout = layout_with(250);
  const auto sizes = kvcache::region_sizes(layout);
  const auto node = c.start("decode-0", allocated(layout));
  ASSERT_TRUE(node);
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    const auto bytes = node->region(i);
    ASSERT_TRUE(bytes);
    EXPECT_EQ(bytes->size(), sizes[i]);
    const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(bytes->data()) % page, 0U);
    EXPECT_TRUE(std::ranges::all_of(*bytes, [](auto byte) { return byte == std::byte{0}; }));
  }
  EXPECT_EQ(node->region(sizes.size()).error().code, errc::out_of_range);
  EXPECT_EQ(node->allocate_blocks(1).error().code, errc::invalid_config);
  const auto pool = node->report().pool;
  EXPECT_EQ(pool.device, "cpu");
  EXPECT_EQ(pool.blocks_total, 250U);
  EXPECT_EQ(pool.bytes, sizes[0] * layers);
  EXPECT_THAT(pool.memory, HasSubstr("pages of "));
  const auto bytes = *node->region(0);
  node->stop();
  bytes.back() = std::byte{1};
  EXPECT_EQ(bytes.back(), std::byte{1});
}

TEST(allocated_cache_memory, is_of_ordinary_pages_and_on_one_numa_node_where_that_is_asked_for) {
  const cluster c{unhurried()};
  cluster::quiet("decode-0");
  auto options = allocated();
  options.allocate = transport::host_memory_options{transport::page_choice::ordinary, 0};
  auto started = engine::start(c.deployment(), "decode-0", std::move(options));
  if (!started && started.error().code == errc::backend_unavailable)
    GTEST_SKIP() << started.error().message;
  ASSERT_TRUE(started) << to_string(started.error());
  const auto pages = std::to_string(::sysconf(_SC_PAGESIZE) / 1024);
  EXPECT_EQ((*started)->report().pool.memory, "pages of " + pages + " KiB, NUMA node 0");
}

/// The error for an engine that starts decode-0 with these options.
troupe::error refused(engine_options options, const std::string& device = "cpu") {
  auto where = unhurried();
  where.decode_device = device;
  const cluster c{where};
  cluster::quiet("decode-0");
  const auto node = engine::start(c.deployment(), "decode-0", std::move(options));
  return node ? troupe::error{} : node.error();
}

TEST(allocated_cache_options, that_contradict_each_other_are_refused_by_name) {
  std::vector<std::byte> memory(5000);
  auto both = allocated();
  both.regions = {memory};
  auto why = refused(both);
  EXPECT_EQ(why.code, errc::invalid_config);
  EXPECT_THAT(why.message, AllOf(HasSubstr("`regions`"), HasSubstr("`allocate`")));

  engine_options no_layout;
  no_layout.allocate.emplace();
  why = refused(no_layout);
  EXPECT_EQ(why.code, errc::invalid_config);
  EXPECT_THAT(why.message, HasSubstr("set `layout`"));

  engine_options only_memory;
  only_memory.regions = {memory};
  why = refused(only_memory);
  EXPECT_EQ(why.code, errc::invalid_config);
  EXPECT_THAT(why.message, HasSubstr("set `layout`"));

  auto no_memory = allocated();
  no_memory.allocate.reset();
  why = refused(no_memory);
  EXPECT_EQ(why.code, errc::invalid_config);
  EXPECT_THAT(why.message, HasSubstr("give `regions`, or set `allocate`"));

  why = refused(allocated(), "gpu:0");
  EXPECT_EQ(why.code, errc::invalid_config);
  EXPECT_THAT(why.message, HasSubstr("gpu:0"));
}

TEST(allocated_cache_options, with_a_layout_that_is_none_are_refused_and_name_what_is_wrong) {
  auto odd = layout_with(250);
  odd.layers[1].planes[0].block_stride = 1;
  auto why = refused(allocated(odd));
  EXPECT_EQ(why.code, errc::invalid_config);
  EXPECT_THAT(why.message, HasSubstr("stride"));

  auto overlapping = layout_with(250);
  overlapping.layers[1].planes[1].base = overlapping.layers[1].planes[0].base;
  why = refused(allocated(overlapping));
  EXPECT_EQ(why.code, errc::invalid_config);
  EXPECT_THAT(why.message, HasSubstr("layer 1"));

  auto other_rank = layout_with(250);
  other_rank.tp_size = 2;
  for (auto& layer : other_rank.layers)
    for (auto& plane : layer.planes) plane.heads = 2;
  EXPECT_EQ(refused(allocated(other_rank)).code, errc::layout_mismatch);
}

TEST(allocated_cache_options, of_more_memory_than_there_is_are_refused_before_any_is_taken) {
  const auto why = refused(allocated(layout_with(4'000'000'000)));
  EXPECT_EQ(why.code, errc::pool_exhausted);
  EXPECT_THAT(why.message, AllOf(HasSubstr("for 2 regions"), HasSubstr("MiB are free"),
                                 HasSubstr("less than its 4000000000 blocks")));
}

TEST(allocated_cache_options,
     with_a_numa_node_that_is_not_there_are_refused_and_name_those_that_are) {
  auto options = allocated();
  options.allocate->numa_node = 4000;
  const auto why = refused(options);
  EXPECT_EQ(why.code, errc::invalid_config);
  EXPECT_THAT(why.message, AllOf(HasSubstr("NUMA node 4000"), HasSubstr("on node 0")));
}

}  // namespace
}  // namespace troupe::testing
