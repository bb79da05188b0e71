// Requests whose groups of layers have block tables of their own, over the same bytes: the tokens
// that the decode side keeps of each group arrive, in whatever chunks they come, and nothing else
// is written.

#include <algorithm>
#include <cstring>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "broken_wire.hpp"
#include "cache_bytes.hpp"
#include "fails_with.hpp"
#include "ways.hpp"

namespace troupe::testing {
namespace {

using ::testing::HasSubstr;

constexpr std::uint32_t block_tokens = 16;
constexpr std::uint32_t pool = 48;
constexpr std::uint32_t layers = 6;
constexpr std::uint32_t tokens = 150;

/// Layers 0, 2, 4 keep everything, 1, 3, 5 a window. Layers 0 and 1 share their bytes, 2 and 3, 4 and 5.
kvcache::cache_layout hybrid() {
  kvcache::cache_shape shape;
  shape.layers = kvcache::attention_layers(layers, 2, 16);
  shape.dtype = "fp16";
  shape.block_tokens = block_tokens;
  shape.blocks = pool;
  auto layout = kvcache::make_layout(shape, {}).value();
  for (auto i = layers; i-- > 0;) layout.layers[i].planes = layout.layers[i / 2].planes;
  layout.groups.resize(2);
  for (std::uint32_t i = 0; i < layers; ++i) layout.groups[i % 2].layers.push_back(i);
  return layout;
}

/// Blocks first, first + step, ... for the tokens from `first_token` on.
group_blocks table(std::uint32_t first_token, std::uint32_t first, std::uint32_t step = 1,
                   std::uint32_t end = tokens) {
  group_blocks of{first_token, {}};
  for (auto at = first_token; at < end; at += block_tokens) {
    of.blocks.push_back(block_id{first});
    first += step;
  }
  return of;
}

class layer_groups : public ::testing::TestWithParam<way> {
 protected:
  std::unique_ptr<cluster> c;
  std::unique_ptr<engine> prefill, decode;

  [[nodiscard]] static engine_options own(kvcache::cache_layout layout) {
    engine_options options;
    options.layout = std::move(layout);
    options.allocate.emplace();
    return options;
  }
  void start(kvcache::cache_layout at_decode = hybrid()) {
    c = std::make_unique<cluster>(unhurried(options_of(GetParam())));
    cluster::quiet("both");
    prefill = c->start("prefill-0", own(hybrid()));
    decode = c->start("decode-0", own(std::move(at_decode)));
    ASSERT_TRUE(prefill && decode);
  }

  [[nodiscard]] receive_spec wish(std::vector<group_blocks> groups, std::uint32_t wanted = tokens,
                                  const std::string& request = "r") const {
    receive_spec spec;
    spec.request = request;
    spec.sources = {"prefill-0"};
    spec.mode = mode_of(GetParam());
    spec.tokens = wanted;
    spec.groups = std::move(groups);
    return spec;
  }
  /// Fills all layers with the pattern, each group from its first token on.
  static void fill(engine& node, const std::vector<group_blocks>& groups, std::uint64_t seed,
                   std::uint32_t from = 0) {
    cache_bytes bytes{node};
    for (std::uint32_t layer = 0; layer < layers; ++layer) {
      const auto& of = groups[layer % 2];
      std::vector<block_id> all(of.first_token / block_tokens);
      all.insert(all.end(), of.blocks.begin(), of.blocks.end());
      bytes.fill(all, layer, layer + 1, std::max(from, of.first_token), tokens, seed);
    }
  }
  static std::vector<std::byte> bytes_of(engine& node) {
    const auto region = node.region(0).value();
    return {region.begin(), region.end()};
  }
  /// Expects the decode side to hold the pattern in those tables from token `from` on, and poison
  /// elsewhere.
  void expect_only(const std::vector<group_blocks>& groups, std::uint64_t seed,
                   std::uint32_t from = 0) {
    const auto arrived = bytes_of(*decode);
    cache_bytes{*decode}.poison();
    fill(*decode, groups, seed, from);
    EXPECT_TRUE(arrived == bytes_of(*decode));
  }
  [[nodiscard]] result<operation_id> send(std::vector<group_blocks> groups,
                                          const std::string& request = "r") {
    send_spec spec;
    spec.request = request;
    spec.groups = std::move(groups);
    return prefill->send(std::move(spec));
  }
};

TEST_P(layer_groups, of_each_what_the_decode_side_keeps_arrives_and_nothing_else) {
  start();
  const std::vector<group_blocks> here{table(0, 0, 2), table(32, 1, 2)};
  const std::vector<group_blocks> there{table(0, 47, ~0U), table(80, 3, 1)};
  fill(*prefill, here, 7);
  cache_bytes{*decode}.poison();
  const auto sent = send(here);
  ASSERT_TRUE(sent) << to_string(sent.error());
  const auto received = decode->receive(wish(there));
  ASSERT_TRUE(received) << to_string(received.error());
  for (std::uint32_t end = 40; end < tokens; end += 40) {
    for (std::uint32_t layer = 0; layer < layers; layer += 3)
      ASSERT_TRUE(prefill->layers_ready(*sent, layer, layer + 3, end));
  }
  ASSERT_TRUE(prefill->seal(*sent, tokens));
  const auto end = decode->wait(*received);
  ASSERT_TRUE(end) << to_string(end.error());
  const std::uint64_t token_bytes =
      std::uint64_t{2} * 2 * 16 * 2;  // K and V, heads, elements, fp16
  EXPECT_EQ(end->bytes, 3 * token_bytes * (tokens + tokens - 80));
  expect_only(there, 7);
  ASSERT_TRUE(prefill->wait(*sent));
}

TEST_P(layer_groups, a_prefix_that_is_there_stays_as_it_is) {
  start();
  const std::vector<group_blocks> here{table(0, 0), table(0, 20)};
  const std::vector<group_blocks> there{table(0, 10), table(48, 30)};
  fill(*prefill, here, 7);
  cache_bytes{*decode}.poison();
  const auto sent = send(here).value();
  ASSERT_TRUE(prefill->seal(sent, tokens));
  auto spec = wish(there);
  spec.prefix_tokens = 70;
  const auto end = decode->wait(decode->receive(spec).value());
  ASSERT_TRUE(end) << to_string(end.error());
  expect_only(there, 7, 70);
}

TEST_P(layer_groups, tables_grow_each_by_itself) {
  start();
  const std::vector<group_blocks> all{table(0, 0), table(48, 20)};
  const std::vector<group_blocks> there{table(0, 10), table(64, 30)};
  fill(*prefill, all, 9);
  cache_bytes{*decode}.poison();
  send_spec spec;
  spec.request = "r";
  spec.grows = true;
  spec.groups = {{0, {}}, {48, {}}};
  const auto sent = prefill->send(spec).value();
  const auto received = decode->receive(wish(there)).value();
  std::uint32_t ready = 0;
  for (std::size_t i = 0; i < all[0].blocks.size(); ++i) {
    ASSERT_TRUE(prefill->add_blocks(sent, {all[0].blocks[i]}, 0));
    if (i >= 3) {
      const auto early = prefill->layers_ready(sent, 0, layers, ready + block_tokens);
      EXPECT_EQ(early.error().code, errc::out_of_range) << "the window has no block of it yet";
      ASSERT_TRUE(prefill->add_blocks(sent, {all[1].blocks[i - 3]}, 1));
    }
    ready = std::min(tokens, static_cast<std::uint32_t>(i + 1) * block_tokens);
    ASSERT_TRUE(prefill->layers_ready(sent, 0, layers, ready));
  }
  const auto wrong = prefill->add_blocks(sent, {block_id{40}}, 2);
  ASSERT_FALSE(wrong);
  EXPECT_EQ(wrong.error().code, errc::out_of_range);
  ASSERT_TRUE(prefill->seal(sent, tokens));
  const auto end = decode->wait(received);
  ASSERT_TRUE(end) << to_string(end.error());
  expect_only(there, 9);
}

TEST_P(layer_groups, who_wants_what_the_source_does_not_hold_is_refused_alone) {
  start();
  const std::vector<group_blocks> here{table(0, 0), table(64, 20)};
  fill(*prefill, here, 7);
  cache_bytes{*decode}.poison();
  const auto sent = send(here).value();
  ASSERT_TRUE(prefill->seal(sent, tokens));
  const auto refused = decode->wait(decode->receive(wish({table(0, 10), table(48, 30)})).value());
  ASSERT_THAT(refused,
              fails_with(errc::out_of_range, HasSubstr("group 1 of layers from token 48 on")));
  const std::vector<group_blocks> fits{table(0, 10), table(64, 30)};
  const auto end = decode->wait(decode->receive(wish(fits)).value());
  ASSERT_TRUE(end) << to_string(end.error());
  expect_only(fits, 7);
}

TEST_P(layer_groups, a_link_that_breaks_under_them_is_made_again_and_loses_nothing) {
  start();
  const std::vector<group_blocks> here{table(0, 0, 2), table(32, 1, 2)};
  const std::vector<group_blocks> there{table(0, 10), table(80, 30)};
  fill(*prefill, here, 7);
  cache_bytes{*decode}.poison();
  const auto sent = send(here).value();
  const auto received = decode->receive(wish(there)).value();
  ASSERT_TRUE(prefill->layers_ready(sent, 0, 3, 100));
  const auto link_is_up = [&](std::uint32_t rebuilds) {
    const auto links = decode->report().links;
    return links.size() == 1 && links.front().state == "up" && links.front().rebuilds >= rebuilds;
  };
  ASSERT_TRUE(comes_true([&] { return link_is_up(0) && decode->report().transfers.size() == 1; }));
  const std::set<int> spared{c->port(), prefill->report().node.port, decode->report().node.port};
  ASSERT_TRUE(comes_true([&] { return cut_connections(spared) > 0; }));
  ASSERT_TRUE(comes_true([&] { return link_is_up(1); }));
  ASSERT_TRUE(prefill->seal(sent, tokens));
  const auto end = decode->wait(received);
  ASSERT_TRUE(end) << to_string(end.error());
  expect_only(there, 7);
}

TEST_P(layer_groups, windows_alone_may_stand_far_behind_what_the_pool_holds) {
  start();
  constexpr std::uint32_t far = 10 * pool * block_tokens;
  constexpr std::uint32_t end = far + 40;
  const std::vector<group_blocks> here{table(far, 0, 1, end), table(far, 20, 1, end)};
  const std::vector<group_blocks> there{table(far, 10, 1, end), table(far + 16, 30, 1, end)};
  for (const bool grows : {false, true}) {
    const auto request = grows ? "grows" : "r";
    const auto received =
        decode->receive(wish(there, end, request));  // first, so that it waits at the prefill side
    ASSERT_TRUE(received) << to_string(received.error());
    send_spec spec;
    spec.request = request;
    spec.grows = grows;
    spec.groups = here;
    const auto sent = prefill->send(std::move(spec));
    ASSERT_TRUE(sent) << to_string(sent.error());
    ASSERT_TRUE(prefill->seal(*sent, end));
    const auto moved = decode->wait(*received);
    ASSERT_TRUE(moved) << to_string(moved.error());
    EXPECT_EQ(moved->bytes, 3 * std::uint64_t{2} * 2 * 16 * 2 * (40 + 24));
  }
}

TEST_P(layer_groups, a_state_moves_though_no_group_keeps_a_token) {
  auto layout = hybrid();
  layout.states.push_back({"conv", kvcache::state_sharding::replicated, 1, 3, 0, 50, 50});
  c = std::make_unique<cluster>(unhurried(options_of(GetParam())));
  cluster::quiet("both");
  prefill = c->start("prefill-0", own(layout));
  decode = c->start("decode-0", own(layout));
  ASSERT_TRUE(prefill && decode);
  const auto state_of = [](engine& node) { return node.region(1).value().subspan(50, 50); };
  std::ranges::fill(state_of(*prefill), std::byte{7});
  send_spec spec;
  spec.request = "r";
  spec.state_slot = 1;
  spec.groups = {{0, {block_id{0}, block_id{1}}}, {0, {block_id{2}, block_id{3}}}};
  const auto sent = prefill->send(std::move(spec)).value();
  ASSERT_TRUE(prefill->seal(sent, 32));
  auto wanted = wish({{32, {}}, {32, {}}}, 32);
  wanted.state_slot = 1;
  const auto moved = decode->wait(decode->receive(wanted).value());
  ASSERT_TRUE(moved) << to_string(moved.error());
  EXPECT_TRUE(std::ranges::equal(state_of(*decode), state_of(*prefill)));
}

TEST_P(layer_groups, what_is_not_one_table_for_each_is_refused_at_once) {
  start();
  const auto refused = [&](const auto& call, errc code, const char* words) {
    ASSERT_THAT(call, fails_with(code, HasSubstr(words))) << words;
  };
  refused(send({table(0, 0)}), errc::invalid_config, "for 1 group of layers; the layout has 2");
  refused(send({table(0, 0), table(8, 20)}), errc::invalid_config,
          "group 1: token 8 is not the first");
  refused(send({table(0, 0), table(0, pool - 1)}), errc::out_of_range, "group 1: block 48");
  refused(decode->receive(wish({})), errc::invalid_config, "for 0 groups of layers");
  auto both = wish({table(0, 0), table(0, 20)});
  both.blocks = {block_id{1}};
  refused(decode->receive(both), errc::invalid_config, "and for all layers");
  refused(decode->receive(wish({table(0, 0), table(32, 5)})), errc::invalid_config,
          "block 5 is named twice");
  refused(decode->receive(wish({table(0, 0), table(32, 20, 1, tokens - block_tokens)})),
          errc::out_of_range, "reach to token 144");
}

TEST_P(layer_groups, a_peer_without_them_is_another_layout) {
  auto without = hybrid();
  without.groups.clear();
  for (std::uint32_t i = 0; i < layers; ++i) {
    for (auto& p : without.layers[i].planes) p.base += i % 2 * pool * p.block_stride * (layers / 2);
  }
  start(without);
  const auto sent = send({table(0, 0), table(0, 20)}).value();
  ASSERT_TRUE(prefill->seal(sent, tokens));
  auto spec = wish({});
  spec.blocks = table(0, 0).blocks;
  const auto end = decode->wait(decode->receive(spec).value());
  ASSERT_THAT(end, fails_with(errc::layout_mismatch, HasSubstr("number of groups of layers")));
}

INSTANTIATE_TEST_SUITE_P(over, layer_groups, ::testing::ValuesIn(every_way()), name_of);

}  // namespace
}  // namespace troupe::testing
