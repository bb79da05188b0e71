// Pipelines: each rank of a replica holds a part of the model's layers, and the two sides are
// divided differently. Every byte of every cache is compared, including those that must not be
// touched.

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>

#include "troupe/actors/cluster_client.hpp"
#include "troupe/kvcache/layer_parts.hpp"
#include "troupe/kvcache/layout_fingerprint.hpp"

#include "fails_with.hpp"
#include "fault_fixture.hpp"

namespace troupe::testing {
namespace {

using kvcache::layer_range;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr std::uint32_t block_tokens = 16;
constexpr std::uint32_t pool = 20;
constexpr std::uint32_t layers = 6;
constexpr std::uint32_t tokens = 100;
constexpr std::uint32_t window = 48;  ///< the first token that the decode side keeps of group 1
constexpr std::uint32_t heads = 4;

/// How a replica is divided.
struct side {
  std::vector<layer_range> parts{{0, layers}};
  std::uint32_t ranks{1};  ///< tensor-parallel ranks of each part

  [[nodiscard]] std::uint32_t count() const {
    return static_cast<std::uint32_t>(parts.size()) * ranks;
  }
};

/// Layer 1 has a state that is replicated on each rank, layer 4 one that is sliced. With groups,
/// even layers keep everything and odd ones a window.
kvcache::cache_layout layout_of(const side& divided, std::uint32_t rank, bool grouped,
                                kvcache::block_order order = kvcache::block_order::layers_first) {
  const auto part = divided.parts[rank / divided.ranks];
  kvcache::cache_shape shape;
  shape.layers = kvcache::attention_layers(part.count(), heads, 16);
  shape.dtype = "fp16";
  shape.block_tokens = block_tokens;
  shape.blocks = pool;
  shape.tp_rank = rank % divided.ranks;
  shape.tp_size = divided.ranks;
  if (divided.parts.size() > 1) {
    shape.first_layer = part.begin;
    shape.total_layers = layers;
  }
  for (auto layer = part.begin; layer < part.end; ++layer) {
    if (layer == 1) shape.states.push_back({"layers.1.conv", 100});
    if (layer != 4) continue;
    shape.states.push_back({"layers.4.ssm", 64 / divided.ranks, kvcache::state_sharding::sliced});
  }
  shape.state_slots = 4;
  auto layout = kvcache::make_layout(shape, {.order = order}).value();
  if (!grouped) return layout;
  layout.groups.resize(2);
  for (std::uint32_t i = 0; i < part.count(); ++i) {
    layout.groups[(part.begin + i) % 2].layers.push_back(i);
  }
  return layout;
}

engine_options own(kvcache::cache_layout layout) {
  engine_options options;
  options.layout = std::move(layout);
  options.allocate.emplace();
  return options;
}

/// Blocks first, first + 2, ... of tokens from `first_token` on.
group_blocks table(std::uint32_t first_token, std::uint32_t first) {
  group_blocks of{first_token, {}};
  for (auto at = first_token; at < tokens; at += block_tokens) {
    of.blocks.push_back(block_id{first});
    first += 2;
  }
  return of;
}

/// Where one request lies at a node: a block table for each group, or a single one.
struct placed_request {
  std::vector<group_blocks> tables;
  std::uint32_t slot{0};

  /// Writes the tokens that are kept, and the states, into that node's cache.
  void fill(engine& node, std::uint64_t seed) const {
    cache_bytes bytes{node};
    const auto& layout = node.layout();
    for (std::uint32_t layer = 0; layer < layout.layers.size(); ++layer) {
      const auto& of = tables[kvcache::table_of(layout, layer)];
      std::vector<block_id> all(of.first_token / block_tokens);
      all.insert(all.end(), of.blocks.begin(), of.blocks.end());
      bytes.fill(all, layer, layer + 1, of.first_token, tokens, seed);
    }
    for (const auto& state : layout.states) {
      const bool sliced = state.sharding == kvcache::state_sharding::sliced;
      const auto first = sliced ? layout.tp_rank * state.slot_bytes : 0;
      const auto region = node.region(state.region).value();
      for (std::uint64_t i = 0; i < state.slot_bytes; ++i) {
        region[state.base + slot * state.slot_stride + i] =
            static_cast<std::byte>(seed * 29 + state.name.size() * 7 + (first + i) * 3);
      }
    }
  }
  /// Names the tables in a spec, leaving those of groups empty of which the node has no layer.
  template <class Spec>
  void name_in(Spec& spec, const kvcache::cache_layout& layout) const {
    spec.state_slot = slot;
    if (layout.groups.empty()) {
      spec.blocks = tables.front().blocks;
      return;
    }
    for (std::uint32_t g = 0; g < tables.size(); ++g) {
      spec.groups.push_back(kvcache::serves_layers(layout, g) ? tables[g] : group_blocks{});
    }
  }
  /// The bytes of the request in the layers of that layout.
  [[nodiscard]] std::uint64_t bytes_of(const kvcache::cache_layout& layout) const {
    std::uint64_t bytes = 0;
    for (std::uint32_t layer = 0; layer < layout.layers.size(); ++layer) {
      const auto kept = tokens - tables[kvcache::table_of(layout, layer)].first_token;
      bytes += kvcache::bytes_per_block(layout, layer) / block_tokens * kept;
    }
    return bytes;
  }
};

std::vector<std::vector<std::byte>> bytes_of(engine& node) {
  std::vector<std::vector<std::byte>> all;
  for (std::size_t i = 0; i < kvcache::region_sizes(node.layout()).size(); ++i) {
    const auto region = node.region(i).value();
    all.emplace_back(region.begin(), region.end());
  }
  return all;
}

/// Expects the cache to hold the request, and poison elsewhere.
void expect_only(engine& node, const placed_request& request, std::uint64_t seed) {
  const auto arrived = bytes_of(node);
  cache_bytes{node}.poison();
  request.fill(node, seed);
  EXPECT_TRUE(arrived == bytes_of(node));
}

result<outcome> end_of(engine& node, operation_id operation) {
  auto end = node.wait(operation, wait_limit);
  if (end) return std::move(*end);
  return fail(errc::deadline, "it goes on");
}

struct scene {
  std::string name;
  side prefill, decode;
  bool grouped{false};
  way how{};
};

class layer_ranges : public ::testing::TestWithParam<scene> {
 protected:
  std::unique_ptr<cluster> c;
  std::vector<std::string> sources;
  std::vector<std::unique_ptr<engine>> prefills, decodes;

  void start(const scene& s) {
    auto options = unhurried(options_of(s.how));
    options.model = "{layers: 6, kv_heads: 4, head_dim: 16, dtype: fp16, block_tokens: 16}";
    options.prefill_pp = static_cast<std::uint32_t>(s.prefill.parts.size());
    options.prefill_tp = s.prefill.ranks;
    options.decode_pp = static_cast<std::uint32_t>(s.decode.parts.size());
    options.decode_tp = s.decode.ranks;
    c = std::make_unique<cluster>(options);
    cluster::quiet("all");
    sources = c->nodes_of("prefill");
    const auto names = c->nodes_of("decode");
    ASSERT_EQ(sources.size(), s.prefill.count());
    ASSERT_EQ(names.size(), s.decode.count());
    for (std::uint32_t rank = 0; rank < s.prefill.count(); ++rank) {
      prefills.push_back(c->start(sources[rank], own(layout_of(s.prefill, rank, s.grouped))));
      ASSERT_TRUE(prefills.back());
    }
    for (std::uint32_t rank = 0; rank < s.decode.count(); ++rank) {
      auto layout = layout_of(s.decode, rank, s.grouped, kvcache::block_order::blocks_first);
      decodes.push_back(c->start(names[rank], own(std::move(layout))));
      ASSERT_TRUE(decodes.back());
    }
  }
  [[nodiscard]] operation_id send(engine& node, const placed_request& request) const {
    send_spec spec;
    spec.request = "r";
    request.name_in(spec, node.layout());
    const auto sent = node.send(std::move(spec));
    EXPECT_TRUE(sent) << to_string(sent.error());
    return sent.value_or(operation_id{});
  }
  [[nodiscard]] receive_spec wish(const engine& node, const placed_request& request,
                                  const way& how) const {
    receive_spec spec;
    spec.request = "r";
    spec.sources = sources;
    spec.mode = mode_of(how);
    spec.tokens = tokens;
    request.name_in(spec, node.layout());
    return spec;
  }
  [[nodiscard]] operation_id receive(engine& node, const placed_request& request,
                                     const way& how) const {
    const auto asked = node.receive(wish(node, request, how));
    EXPECT_TRUE(asked) << to_string(asked.error());
    return asked.value_or(operation_id{});
  }
};

TEST_P(layer_ranges, of_any_parts_bring_each_rank_its_bytes_and_no_others) {
  const auto& s = GetParam();
  start(s);
  placed_request here{{table(0, 0)}, 1};
  placed_request there{{table(0, 5)}, 3};
  if (s.grouped) {
    here.tables.push_back(table(16, 3));
    there.tables.push_back(table(window, 0));
  }
  std::vector<operation_id> sent, asked;
  for (auto& node : prefills) {
    here.fill(*node, 7);
    sent.push_back(send(*node, here));
  }
  for (auto& node : decodes) {
    cache_bytes{*node}.poison();
    asked.push_back(receive(*node, there, s.how));
  }
  for (std::size_t rank = prefills.size(); rank-- > 0;) {
    auto& node = *prefills[rank];
    const auto count = static_cast<std::uint32_t>(node.layout().layers.size());
    for (const std::uint32_t end : {40U, 80U}) {
      for (std::uint32_t layer = 0; layer < count; ++layer)
        ASSERT_TRUE(node.layers_ready(sent[rank], layer, layer + 1, end));
    }
    ASSERT_TRUE(node.seal(sent[rank], tokens, {static_cast<std::byte>(rank)}));
  }
  for (std::size_t rank = 0; rank < decodes.size(); ++rank) {
    SCOPED_TRACE("decode rank " + std::to_string(rank));
    const auto end = end_of(*decodes[rank], asked[rank]);
    ASSERT_TRUE(end) << to_string(end.error());
    EXPECT_EQ(end->aux, (std::vector<std::byte>{std::byte{0}})) << "that of the first source";
    const auto& layout = decodes[rank]->layout();
    EXPECT_GE(end->bytes, there.bytes_of(layout));
    EXPECT_LE(end->bytes, there.bytes_of(layout) + kvcache::bytes_per_state(layout));
    expect_only(*decodes[rank], there, 7);
  }
  for (std::size_t rank = 0; rank < prefills.size(); ++rank) {
    SCOPED_TRACE("prefill rank " + std::to_string(rank));
    const auto end = end_of(*prefills[rank], sent[rank]);
    EXPECT_TRUE(end) << to_string(end.error());
  }
}

std::vector<scene> scenes() {
  const side whole;
  const side whole_of_4{{{0, layers}}, 4};
  const side halves_of_2{{{0, 3}, {3, 6}}, 2};
  const side thirds{{{0, 1}, {1, 4}, {4, 6}}};
  const side uneven{{{0, 2}, {2, 5}, {5, 6}}};
  const side two_of_2{{{0, 4}, {4, 6}}, 2};
  const std::vector<scene> divisions{
      {"two_parts_of_2_to_one_of_4", halves_of_2, whole_of_4},
      {"one_part_to_three", whole, thirds},
      {"three_parts_to_two_of_2", uneven, two_of_2},
      {"two_parts_of_2_to_themselves", halves_of_2, halves_of_2},
      // The first part of three has no layer of the window's group.
      {"groups_of_three_parts_to_one", thirds, whole, true},
      {"groups_of_one_part_to_three", whole, thirds, true},
      {"groups_of_three_parts_to_three_others", thirds, uneven, true},
  };
  std::vector<scene> all;
  for (auto one : divisions) {
    for (const auto& how : every_way()) {
      // Many nodes take an emulated machine several seconds, so each division runs in one mode
      // there.
      if (have_verbs() && (how.mode == "read") != one.grouped) continue;
      one.how = how;
      all.push_back(one);
    }
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(over, layer_ranges, ::testing::ValuesIn(scenes()), [](const auto& test) {
  return test.param.name + "_" + test.param.how.backend + "_" + test.param.how.mode;
});

class told_layers : public layer_ranges {};

TEST_P(told_layers, are_complete_when_those_have_sent_them_who_hold_them) {
  const auto& s = GetParam();
  start(s);
  const placed_request here{{table(0, 0)}, 1};
  const placed_request there{{table(0, 5)}, 3};
  std::vector<operation_id> sent;
  for (auto& node : prefills) {
    here.fill(*node, 7);
    sent.push_back(send(*node, here));
  }
  auto& decode = *decodes.front();
  listener events{decode};
  const auto asked = receive(decode, there, s.how);
  const auto told = [&](std::uint32_t layer) {
    std::uint32_t end = 0;
    for (const auto& slice : events.of(asked).layers) {
      if (layer >= slice.layer_begin && layer < slice.layer_end) end = slice.token_end;
    }
    return end;
  };
  const auto all_told = [&](std::uint32_t begin, std::uint32_t end, std::uint32_t token_end) {
    for (auto layer = begin; layer < end; ++layer)
      if (told(layer) != token_end) return false;
    return true;
  };
  // The second part, whose layers 0 to 2 are layers 3 to 5 of the model.
  ASSERT_TRUE(prefills[1]->layers_ready(sent[1], 0, 3, 60));
  ASSERT_TRUE(events.until([&] { return all_told(3, 6, 60); }));
  events.listen_for(200ms);
  EXPECT_TRUE(all_told(0, 3, 0)) << "nobody has sent these";
  ASSERT_TRUE(prefills[0]->layers_ready(sent[0], 1, 2, tokens));
  ASSERT_TRUE(events.until([&] { return told(1) == tokens; }));
  EXPECT_TRUE(all_told(3, 6, 60));
  EXPECT_EQ(cache_bytes{decode}.differing_layers(there.tables[0].blocks, 1, 2, 0, tokens, 7), 0u);
  for (std::size_t rank = 0; rank < prefills.size(); ++rank)
    ASSERT_TRUE(prefills[rank]->seal(sent[rank], tokens));
  ASSERT_TRUE(events.outcome(asked));
  EXPECT_EQ(events.of(asked).done, 1) << to_string(events.of(asked).why);
  EXPECT_TRUE(all_told(0, layers, tokens));
}

std::vector<scene> in_two_parts() {
  std::vector<scene> all;
  for (const auto& backend : every_backend()) {
    all.push_back({"halves", {{{0, 3}, {3, 6}}}, {}, false, {backend, "write"}});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(over, told_layers, ::testing::ValuesIn(in_two_parts()),
                         [](const auto& test) { return test.param.how.backend; });

/// One rank is refused by a source after the others accepted its receive, because it moves nothing
/// from those, or other layers than the refused ones.
class refused_rank : public layer_ranges {
 protected:
  /// The source's tables begin with its window: a receiver that keeps no more of it fits.
  const placed_request here{{table(0, 0), table(64, 3)}, 1};
  const placed_request there{{table(0, 5), table(80, 0)}, 3};
  std::vector<operation_id> sent;

  void start_and_send() {
    start(GetParam());
    for (auto& node : prefills) {
      here.fill(*node, 7);
      sent.push_back(send(*node, here));
    }
    for (auto& node : decodes) cache_bytes{*node}.poison();
  }
  [[nodiscard]] operation_id receive_with(engine& node, const std::string& expected) const {
    auto spec = wish(node, there, GetParam().how);
    for (const char one : expected) spec.expect.push_back(static_cast<std::byte>(one));
    const auto asked = node.receive(std::move(spec));
    EXPECT_TRUE(asked) << to_string(asked.error());
    return asked.value_or(operation_id{});
  }
  void seal(std::size_t rank) {
    ASSERT_TRUE(prefills[rank]->seal(sent[rank], tokens, {std::byte{'a'}}));
  }
  void expect_all_received(const std::vector<operation_id>& asked) {
    for (std::size_t rank = 0; rank < decodes.size(); ++rank) {
      SCOPED_TRACE("decode rank " + std::to_string(rank));
      const auto end = end_of(*decodes[rank], asked[rank]);
      ASSERT_TRUE(end) << to_string(end.error());
      expect_only(*decodes[rank], there, 7);
    }
    for (std::size_t rank = 0; rank < prefills.size(); ++rank) {
      SCOPED_TRACE("prefill rank " + std::to_string(rank));
      const auto end = end_of(*prefills[rank], sent[rank]);
      EXPECT_TRUE(end) << to_string(end.error());
    }
  }
};

TEST_P(refused_rank, for_what_it_keeps_asks_again_and_no_send_has_failed) {
  start_and_send();
  auto& first = *decodes.front();
  const placed_request more{{table(0, 5), table(window, 0)}, 3};
  const auto refused = end_of(first, receive(first, more, GetParam().how));
  ASSERT_THAT(refused,
              fails_with(errc::out_of_range, HasSubstr("group 1 of layers from token 48 on")));
  std::vector<operation_id> asked;
  for (auto& node : decodes) asked.push_back(receive_with(*node, ""));
  for (std::size_t rank = 0; rank < prefills.size(); ++rank) seal(rank);
  expect_all_received(asked);
}

TEST_P(refused_rank, for_what_it_expects_asks_again_and_no_send_has_failed) {
  start_and_send();
  // A source that is not sealed cannot know yet whether it is the expected request.
  const auto last = prefills.size() - 1;
  seal(last);
  auto& first = *decodes.front();
  const auto refused = end_of(first, receive_with(first, "b"));
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, errc::layout_mismatch);
  std::vector<operation_id> asked;
  for (auto& node : decodes) asked.push_back(receive_with(*node, "a"));
  for (std::size_t rank = 0; rank < last; ++rank) seal(rank);
  expect_all_received(asked);
}

std::vector<scene> with_several_sources() {
  const side two{{{0, layers}}, 2};
  const side parts{{{0, 1}, {1, 4}, {4, 6}}};
  std::vector<scene> all;
  for (const auto& how : every_way()) {
    all.push_back({"of_two_ranks", two, two, true, how});
    // The first part has no layer of the window's group.
    all.push_back({"of_three_parts", parts, {}, true, how});
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(over, refused_rank, ::testing::ValuesIn(with_several_sources()),
                         [](const auto& test) {
                           return test.param.name + "_" + test.param.how.backend + "_" +
                                  test.param.how.mode;
                         });

/// Replicas of an open stage, whose sources each receive names itself.
class joined_parts : public ::testing::Test {
 protected:
  cluster c{open_cluster()};

  void SetUp() override { cluster::quiet("joined"); }

  static cluster_options open_cluster() {
    auto options = unhurried();
    options.more_stages = "  - {name: engines, role: both, open: {max_nodes: 16}}\n";
    options.more_edges = "  - {from: engines, to: engines, mode: read}\n";
    return options;
  }
  static engine_options joining(const std::string& replica, layer_range held, std::uint32_t rank,
                                std::uint32_t ranks) {
    auto layout = layout_of({{held}, 1}, 0, false);
    layout.first_layer = held.begin;
    layout.total_layers = layers;
    auto options = own(std::move(layout));
    options.join = announcement{"engines", replica, rank, ranks};
    return options;
  }
  [[nodiscard]] std::unique_ptr<engine> join(const std::string& replica, layer_range held,
                                             std::uint32_t rank, std::uint32_t ranks) const {
    return c.start("", joining(replica, held, rank, ranks));
  }
  static operation_id offer(engine& node) {
    here.fill(node, 7);
    send_spec spec;
    spec.request = "r";
    here.name_in(spec, node.layout());
    const auto sent = node.send(std::move(spec));
    EXPECT_TRUE(sent) << to_string(sent.error());
    EXPECT_TRUE(node.seal(sent.value_or(operation_id{}), tokens));
    return sent.value_or(operation_id{});
  }
  static result<outcome> take(engine& node, std::vector<std::string> sources) {
    receive_spec spec;
    spec.request = "r";
    spec.sources = std::move(sources);
    spec.mode = actors::transfer_mode::read;
    spec.tokens = tokens;
    there.name_in(spec, node.layout());
    const auto asked = node.receive(std::move(spec));
    if (!asked) return fail(asked.error());
    return end_of(node, *asked);
  }

  static inline const placed_request here{{table(0, 0)}, 1};
  static inline const placed_request there{{table(0, 5)}, 3};
};

TEST_F(joined_parts, of_which_one_is_missing_are_refused_before_a_byte_moves) {
  const auto first = join("p", {0, 4}, 0, 2);
  const auto second = join("p", {4, 6}, 1, 2);
  const auto all = join("all", {0, 6}, 0, 1);
  ASSERT_TRUE(first && second && all);
  const auto sent = offer(*first);
  const auto other = offer(*second);
  cache_bytes{*all}.poison();
  const auto untouched = bytes_of(*all);
  const auto lacks = take(*all, {"engines.p.0"});
  ASSERT_THAT(lacks,
              fails_with(errc::layout_mismatch, AllOf(HasSubstr("layers 4 to 5 of the model's 6"),
                                                      HasSubstr("none of the sources"))));
  EXPECT_TRUE(bytes_of(*all) == untouched);
  const auto whole = take(*all, {"engines.p.0", "engines.p.1"});
  ASSERT_TRUE(whole) << to_string(whole.error());
  expect_only(*all, there, 7);
  EXPECT_TRUE(end_of(*first, sent));
  EXPECT_TRUE(end_of(*second, other));
}

TEST_F(joined_parts, of_which_two_hold_one_layer_are_refused_by_name) {
  const auto first = join("p", {0, 4}, 0, 2);
  const auto second = join("p", {3, 6}, 1, 2);
  const auto all = join("all", {0, 6}, 0, 1);
  ASSERT_TRUE(first && second && all);
  (void)offer(*first);
  (void)offer(*second);
  const auto twice = take(*all, {"engines.p.1", "engines.p.0"});
  ASSERT_THAT(twice, fails_with(errc::layout_mismatch,
                                AllOf(HasSubstr("layer 3 of the model's 6"),
                                      HasSubstr("`engines.p.0` and by `engines.p.1`"))));
}

TEST_F(joined_parts, that_do_not_stand_where_they_say_do_not_start) {
  const auto refused = [&](engine_options options) {
    const auto started = engine::start(c.deployment(), "", std::move(options));
    return started ? troupe::error{errc::internal, "it started"} : started.error();
  };
  const auto why = refused(joining("p", {0, 3}, 1, 2));
  EXPECT_EQ(why.code, errc::invalid_config);
  EXPECT_THAT(why.message, AllOf(HasSubstr("rank 1 of 2"),
                                 HasSubstr("says rank 0 of 1 and layers 0 to 2 of the model's 6")));
  EXPECT_EQ(refused(joining("p", {0, 6}, 0, 2)).code, errc::invalid_config);
  EXPECT_EQ(refused(joining("p", {3, 6}, 1, 3)).code, errc::invalid_config);
}

TEST_F(joined_parts, are_placed_with_a_replica_that_is_not_divided_once_all_are_there) {
  actors::cluster_client_options asking;
  asking.port = static_cast<std::uint16_t>(c.port());
  asking.timeout = wait_limit;
  const auto frontend = actors::cluster_client::unconnected(asking);
  const auto place = [&](const std::string& id, std::uint32_t timeout_ms) {
    actors::placement_request request;
    request.request = id;
    request.from = request.to = "engines";
    request.timeout_ms = timeout_ms;
    return frontend->place(request);
  };
  const auto all = join("all", {0, 6}, 0, 1);
  const auto first = join("p", {0, 4}, 0, 2);
  ASSERT_TRUE(all && first);
  EXPECT_FALSE(place("early", 200)) << "the replica lacks a part";
  const auto second = join("p", {4, 6}, 1, 2);
  ASSERT_TRUE(second);
  const auto where = place("r", 10'000);
  ASSERT_TRUE(where) << to_string(where.error());
  EXPECT_EQ(where->prefill.size() + where->decode.size(), 3u);
  EXPECT_EQ(where->fingerprint, kvcache::fingerprint_of(first->layout()));
}

TEST(parts_of_a_file, have_the_layers_that_it_gives_them) {
  auto options = unhurried();
  options.prefill_pp = 2;
  options.prefill_tp = 2;
  const cluster c{options};
  cluster::quiet("all");
  EXPECT_EQ(c.nodes_of("prefill"),
            (std::vector<std::string>{"prefill-0-pp0-tp0", "prefill-0-pp0-tp1", "prefill-0-pp1-tp0",
                                      "prefill-0-pp1-tp1"}));
  const auto node = c.start("prefill-0-pp1-tp0");
  ASSERT_TRUE(node);
  EXPECT_EQ(kvcache::held_layers(node->layout()), (layer_range{2, 4}));
  EXPECT_EQ(node->layout().total_layers, 4u);
  EXPECT_EQ(node->layout().tp_rank, 0u);
  EXPECT_EQ(node->report().node.rank, 2u);
  EXPECT_EQ(node->report().node.ranks, 4u);
  auto other = layout_of({{{0, 2}}, 2}, 0, false);
  other.total_layers = 4;
  const auto refused = engine::start(c.deployment(), "prefill-0-pp1-tp1", own(std::move(other)));
  ASSERT_THAT(refused,
              fails_with(errc::layout_mismatch,
                         AllOf(HasSubstr("prefill-0-pp1-tp1"), HasSubstr("rank 3 of 4"),
                               HasSubstr("says rank 0 of 2 and layers 0 to 1 of the model's 4"))));
}

/// A pipeline of two parts, one of which is killed.
class part_that_dies : public ::testing::TestWithParam<way> {
 protected:
  static cluster_options in_two_parts() {
    auto options = unhurried(options_of(GetParam()));
    options.prefill_pp = 2;
    options.retry_window = "10min";
    return options;
  }
};

TEST_P(part_that_dies, is_asked_again_in_its_next_life_and_the_others_with_it) {
  const cluster c{in_two_parts()};
  const auto lives = later(c, "prefill-0-pp0", scripted_prefill);
  const auto dies = later(c, "prefill-0-pp1", scripted_prefill);
  const auto next = later(c, "prefill-0-pp1", scripted_prefill);
  cluster::quiet("decode-0");
  const auto node = c.start("decode-0");
  ASSERT_TRUE(node);
  cache_bytes cache{*node};
  listener events{*node};
  const auto receive = [&] {
    const auto asked =
        node->receive({"r", {"prefill-0-pp0", "prefill-0-pp1"}, mode_of(GetParam()), 50});
    EXPECT_TRUE(asked) << to_string(asked.error());
    return asked.value_or(operation_id{});
  };
  begin(*lives);
  begin(*dies);
  for (auto* part : {&lives, &dies}) ASSERT_EQ(ask(**part, "send r 50 3"), "ok");
  const auto first = receive();
  ASSERT_EQ(ask(*lives, "ready 2"), "ok");
  ASSERT_EQ(ask(*lives, "seal"), "ok");
  ASSERT_TRUE(events.moving(2));
  dies->end(SIGKILL);
  ASSERT_TRUE(events.unpinned(first));
  EXPECT_EQ(events.of(first).failed, 1);
  EXPECT_EQ(events.of(first).why.code, errc::peer_lost) << to_string(events.of(first).why);
  const auto& taken = events.of(first).allocated;
  ASSERT_TRUE(taken);
  ASSERT_TRUE(node->free_blocks(taken->owner, taken->blocks));
  begin(*next);
  for (const auto* line : {"send r 50 3", "ready 2", "seal"}) ASSERT_EQ(ask(*next, line), "ok");
  cache.poison();
  const auto second = receive();
  ASSERT_TRUE(events.unpinned(second));
  ASSERT_EQ(events.of(second).done, 1) << to_string(events.of(second).why);
  EXPECT_EQ(cache.differing(events.of(second).allocated->blocks, 0, 50, 3), 0u);
  EXPECT_EQ(ask(*lives, "outcome"), "done");
  EXPECT_EQ(ask(*next, "outcome"), "done");
}

INSTANTIATE_TEST_SUITE_P(over, part_that_dies, ::testing::ValuesIn(every_way()), name_of);

}  // namespace
}  // namespace troupe::testing
