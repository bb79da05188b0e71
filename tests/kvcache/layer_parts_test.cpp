// Pipeline ranks, each of which holds part of the model's layers. However the two sides are
// divided, every byte of a destination comes from exactly one source, and no rank is granted a byte
// of a layer that it does not hold.

#include "troupe/kvcache/layer_parts.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include <gmock/gmock.h>

#include "troupe/kvcache/layout_fingerprint.hpp"
#include "troupe/kvcache/plan.hpp"

#include "fails_with.hpp"
#include "random_layouts.hpp"
#include "sanitized.hpp"

namespace troupe::kvcache {
namespace {

using ::testing::AllOf;
using testing::dice;
using ::testing::HasSubstr;
using troupe::testing::fails_with;

constexpr std::byte untouched{0xee};
constexpr std::uint32_t pool = 12;
constexpr std::uint32_t slots = 4;

/// A model, and how its layers share block tables.
struct drawn_model {
  cache_shape shape;
  std::uint32_t groups{0};
  std::vector<std::uint32_t> group_of{};  ///< by layer

  [[nodiscard]] std::uint32_t layers() const {
    return static_cast<std::uint32_t>(shape.layers.size());
  }
};

drawn_model draw_model(dice& d) {
  drawn_model model{testing::random_model(d)};
  model.shape.blocks = pool;
  model.shape.block_tokens = d.roll(1, 4);
  std::uint32_t keeping = 0;
  for (const auto& layer : model.shape.layers) keeping += layer.kind != layer_kind::recurrent;
  if (keeping > 0 && d.one_in(2)) model.groups = d.roll(1, std::min(keeping, 3U));
  std::uint32_t number = 0;
  for (const auto& layer : model.shape.layers) {
    const bool keeps = layer.kind != layer_kind::recurrent;
    model.group_of.push_back(keeps && model.groups > 0 ? number++ % model.groups : 0);
  }
  return model;
}

/// Bytes of a state of the whole model; divisible by any number of ranks up to 4.
std::uint64_t state_bytes(std::uint32_t layer) {
  return 12 * (1 + layer % 3);
}

/// The layout of one rank: these layers of the model, with the states of the recurrent ones.
cache_layout part_of(const drawn_model& model, layer_range held, std::uint32_t rank,
                     std::uint32_t ranks, dice& d) {
  auto shape = model.shape;
  shape.layers.assign(model.shape.layers.begin() + held.begin,
                      model.shape.layers.begin() + held.end);
  shape.tp_rank = rank;
  shape.tp_size = ranks;
  shape.state_slots = slots;
  for (auto layer = held.begin; layer < held.end; ++layer) {
    if (model.shape.layers[layer].kind != layer_kind::recurrent) continue;
    const bool sliced = layer % 2 == 0;
    shape.states.push_back({"layer" + std::to_string(layer),
                            state_bytes(layer) / (sliced ? ranks : 1),
                            sliced ? state_sharding::sliced : state_sharding::replicated});
  }
  const bool whole = held.count() == model.layers();
  if (!whole || d.one_in(2)) {
    shape.first_layer = held.begin;
    shape.total_layers = model.layers();
  }
  auto layout = make_layout(shape, testing::random_arrangement(d)).value();
  layout.groups.resize(model.groups);
  for (std::uint32_t i = 0; i < held.count() && model.groups > 0; ++i) {
    if (layout.layers[i].shape.kind == layer_kind::recurrent) continue;
    layout.groups[model.group_of[held.begin + i]].layers.push_back(i);
  }
  const auto fine = check(layout);
  EXPECT_TRUE(fine) << fine.error().message;
  return layout;
}

/// Draws ranges that together make up all layers, in order.
std::vector<layer_range> draw_parts(std::uint32_t layers, dice& d) {
  std::vector<layer_range> parts;
  for (std::uint32_t begin = 0; begin < layers;) {
    const auto end = d.one_in(3) ? layers : d.roll(begin + 1, layers);
    parts.push_back({begin, end});
    begin = end;
  }
  return parts;
}

/// Draws the layouts of a replica: each part at each tensor-parallel rank.
std::vector<cache_layout> draw_replica(const drawn_model& model, dice& d) {
  const auto ranks = d.roll(1, 4);
  std::vector<cache_layout> replica;
  for (const auto held : draw_parts(model.layers(), d)) {
    for (std::uint32_t rank = 0; rank < ranks; ++rank) {
      replica.push_back(part_of(model, held, rank, ranks, d));
    }
  }
  return replica;
}

/// The blocks of a request by group, and the tokens kept of each.
struct request_blocks {
  std::vector<std::vector<block_id>> blocks;
  std::vector<std::uint64_t> from;

  [[nodiscard]] std::vector<block_table> tables() const {
    std::vector<block_table> out;
    for (std::size_t g = 0; g < blocks.size(); ++g) {
      out.push_back({block_list{blocks[g]}, from[g]});
    }
    return out;
  }
  /// The tables as one source and one destination know them: empty for a group that they do not
  /// share.
  [[nodiscard]] std::vector<block_table> tables(const transfer_geometry& geometry,
                                                std::uint64_t tokens) const {
    auto out = tables();
    for (std::uint32_t g = 0; g < out.size(); ++g) {
      if (geometry.tables() > 1 && !geometry.shares_table(g)) out[g] = {block_list{}, tokens};
    }
    return out;
  }
};

request_blocks draw_blocks(const drawn_model& model, std::uint32_t tokens, dice& d) {
  request_blocks of;
  for (std::uint32_t g = 0; g < std::max(model.groups, 1U); ++g) {
    std::vector<block_id> all(pool);
    for (std::uint32_t i = 0; i < pool; ++i) all[i].value = i;
    for (std::uint32_t i = 0; i + 1 < pool; ++i) std::swap(all[i], all[d.roll(i, pool - 1)]);
    all.resize(blocks_in({0, tokens}, model.shape.block_tokens));
    of.blocks.push_back(std::move(all));
    of.from.push_back(model.groups > 0 ? d.roll<std::uint64_t>(0, tokens) : 0);
  }
  return of;
}

using regions = std::vector<std::vector<std::byte>>;

regions regions_of(const cache_layout& layout) {
  regions made;
  for (const auto size : region_sizes(layout)) made.emplace_back(size, untouched);
  return made;
}

/// Visits each byte of these layers of the model: where it lies and its value.
template <class Each>
void each_byte(const cache_layout& layout, layer_range model_layers,
               const std::vector<block_table>& tables, token_range tokens, Each&& each) {
  for (auto number = model_layers.begin; number < model_layers.end; ++number) {
    const auto layer = number - layout.first_layer;
    const auto& shape = layout.layers[layer].shape;
    const auto& table = tables[table_of(layout, layer)];
    const auto kept = table.kept_of(tokens);
    const auto first_head = shape.kind == layer_kind::attention
                                ? head_range(shape.kv_heads, layout.tp_size, layout.tp_rank).begin
                                : 0;
    const auto& planes = layout.layers[layer].planes;
    for (std::uint32_t plane = 0; plane < planes.size(); ++plane) {
      for (auto token = kept.begin; token < kept.end; ++token) {
        for (std::uint32_t head = 0; head < planes[plane].heads; ++head) {
          const auto at =
              locate(layout, table.blocks, {layer, plane, static_cast<std::uint32_t>(token), head})
                  .value();
          for (std::uint64_t i = 0; i < at.length; ++i) {
            each(at.region, at.offset + i,
                 static_cast<std::byte>(number * 41 + plane * 131 + token * 37 +
                                        (first_head + head) * 17 + i * 5));
          }
        }
      }
    }
  }
}

template <class Each>
void each_state_byte(const cache_layout& layout, layer_range model_layers, std::uint32_t slot,
                     Each&& each) {
  for (const auto& state : layout.states) {
    const auto number = static_cast<std::uint32_t>(std::stoul(state.name.substr(5)));
    if (number < model_layers.begin || number >= model_layers.end) continue;
    const bool sliced = state.sharding == state_sharding::sliced;
    const auto first = sliced ? layout.tp_rank * state.slot_bytes : 0;
    for (std::uint64_t i = 0; i < state.slot_bytes; ++i) {
      each(state.region, state.base + slot * state.slot_stride + i,
           static_cast<std::byte>(number * 53 + (first + i) * 3 + 1));
    }
  }
}

void apply(const transfer_plan& plan, const regions& from, regions& to) {
  for (const auto& piece : plan.pieces) {
    for (const auto& s : piece.segments) {
      for (std::uint32_t i = 0; i < s.count; ++i) {
        std::memcpy(to[piece.remote_region].data() + s.remote_offset + i * s.remote_stride,
                    from[piece.local_region].data() + s.local_offset + i * s.local_stride,
                    s.length);
      }
    }
  }
}

/// Expects that the destination grants the source exactly the tokens of the layers that both hold,
/// byte by byte.
void expect_exact_grant(const transfer_geometry& geometry, const cache_layout& source,
                        const cache_layout& destination, token_range tokens,
                        const std::vector<block_table>& tables, std::uint32_t slot) {
  std::vector<std::vector<bool>> expected;
  for (const auto size : region_sizes(destination)) expected.emplace_back(size, false);
  const auto shared = shared_layers(source, destination);
  const auto mark = [&](std::uint32_t region, std::uint64_t at, std::byte /*value*/) {
    expected[region][at] = true;
  };
  each_byte(destination, shared, tables, tokens, mark);
  each_state_byte(destination, shared, slot, mark);
  const auto granted = geometry.remote_map().bytes_of(tokens, tables, slot).value();
  ASSERT_EQ(granted.size(), expected.size());
  for (std::size_t region = 0; region < expected.size(); ++region) {
    for (std::uint64_t at = 0; at < expected[region].size(); ++at) {
      ASSERT_EQ(granted[region].covers({at, 1, 0, 1}), expected[region][at])
          << "byte " << at << " of region " << region;
    }
  }
}

TEST(layer_parts, any_parts_of_the_two_sides_move_each_byte_of_a_destination_and_no_other) {
  std::uint32_t divided = 0;
  for (std::uint64_t seed = 1; seed <= troupe::testing::tries(400U); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    dice d{seed};
    const auto model = draw_model(d);
    const auto sources = draw_replica(model, d);
    const auto destinations = draw_replica(model, d);
    divided += is_part(sources.front()) && is_part(destinations.front()) ? 1 : 0;
    const auto tokens = d.roll(1, pool * model.shape.block_tokens);
    const token_range moved{d.one_in(2) ? 0 : d.roll<std::uint64_t>(0, tokens), tokens};
    const auto here_blocks = draw_blocks(model, tokens, d);
    const auto there_blocks = draw_blocks(model, tokens, d);
    const auto from_slot = d.roll(0, slots - 1);
    const auto to_slot = d.roll(0, slots - 1);
    std::vector<regions> caches;
    const request_blocks all_held{here_blocks.blocks,
                                  std::vector<std::uint64_t>(here_blocks.from.size(), 0)};
    for (const auto& source : sources) {
      caches.push_back(regions_of(source));
      const auto fill = [&](std::uint32_t region, std::uint64_t at, std::byte value) {
        caches.back()[region][at] = value;
      };
      each_byte(source, held_layers(source), all_held.tables(), {0, tokens}, fill);
      each_state_byte(source, held_layers(source), from_slot, fill);
    }
    for (const auto& destination : destinations) {
      auto arrived = regions_of(destination);
      std::uint64_t bytes = 0;
      std::vector<source_layout> named;
      for (std::size_t i = 0; i < sources.size(); ++i) {
        named.push_back({"source", &sources[i]});
        const auto geometry =
            transfer_geometry::create(sources[i], destination, data_flow::to_remote).value();
        const auto reverse =
            transfer_geometry::create(destination, sources[i], data_flow::to_local).value();
        const auto here = all_held.tables(geometry, tokens);
        const auto there = there_blocks.tables(geometry, tokens);
        if (moved.begin < moved.end && d.one_in(4)) {
          expect_exact_grant(geometry, sources[i], destination, moved, there, to_slot);
        }
        const auto cut = d.roll(0, geometry.layers());
        for (const layer_range some : {layer_range{0, cut}, layer_range{cut, geometry.layers()}}) {
          const auto plan = geometry.plan(some, moved, here, there);
          ASSERT_TRUE(plan) << plan.error().message;
          const auto pulled = reverse.plan(some, moved, there, here);
          ASSERT_TRUE(pulled) << pulled.error().message;
          EXPECT_EQ(pulled->bytes, plan->bytes);
          apply(*plan, caches[i], arrived);
          bytes += plan->bytes;
        }
        const auto state = geometry.plan_state(from_slot, to_slot);
        ASSERT_TRUE(state) << state.error().message;
        apply(*state, caches[i], arrived);
        bytes += state->bytes;
      }
      const auto covered = check_covers(destination, named);
      EXPECT_TRUE(covered) << covered.error().message;
      auto expected = regions_of(destination);
      std::uint64_t wanted = 0;
      const auto put = [&](std::uint32_t region, std::uint64_t at, std::byte value) {
        expected[region][at] = value;
        ++wanted;
      };
      each_byte(destination, held_layers(destination), there_blocks.tables(), moved, put);
      each_state_byte(destination, held_layers(destination), to_slot, put);
      for (std::size_t region = 0; region < expected.size(); ++region) {
        for (std::size_t at = 0; at < expected[region].size(); ++at) {
          ASSERT_EQ(arrived[region][at], expected[region][at])
              << "byte " << at << " of region " << region;
        }
      }
      ASSERT_EQ(bytes, wanted) << "a byte came twice";
    }
  }
  EXPECT_GT(divided, troupe::testing::tries(20U));
}

/// Layers [begin, end) of a model of attention layers.
cache_layout part(std::uint32_t begin, std::uint32_t end, std::uint32_t total,
                  std::uint32_t rank = 0, std::uint32_t ranks = 1,
                  const std::vector<std::string>& states = {}) {
  cache_shape shape;
  shape.layers = attention_layers(end - begin, 4, 8);
  shape.block_tokens = 4;
  shape.blocks = 8;
  shape.tp_rank = rank;
  shape.tp_size = ranks;
  shape.first_layer = begin;
  shape.total_layers = total;
  for (const auto& name : states) shape.states.push_back({name, 16, state_sharding::replicated});
  shape.state_slots = states.empty() ? 0 : 2;
  return make_layout(shape, {}).value();
}

cache_layout whole(std::uint32_t layers) {
  return part(0, layers, 0);
}

TEST(layer_parts, say_which_of_the_models_layers_they_are) {
  EXPECT_EQ(held_layers(part(2, 5, 8)), (layer_range{2, 5}));
  EXPECT_EQ(total_layers_of(part(2, 5, 8)), 8U);
  EXPECT_TRUE(is_part(part(2, 5, 8)));
  EXPECT_EQ(held_layers(whole(8)), (layer_range{0, 8}));
  EXPECT_EQ(total_layers_of(whole(8)), 8U);
  EXPECT_FALSE(is_part(whole(8)));
  EXPECT_FALSE(is_part(part(0, 8, 8)));
  EXPECT_EQ(shared_layers(part(2, 5, 8), part(4, 8, 8)), (layer_range{4, 5}));
  EXPECT_EQ(shared_layers(part(0, 2, 8), part(4, 8, 8)).count(), 0U);
}

TEST(layer_parts, that_are_none_are_refused_by_name) {
  const auto refused = [](auto change, const char* words) {
    auto layout = part(2, 5, 8);
    change(layout);
    const auto ok = check(layout);
    ASSERT_THAT(ok, fails_with(errc::invalid_config, HasSubstr(words))) << words;
  };
  refused([](auto& l) { l.first_layer = 6; }, "first_layer is 6, expected 0 to 5");
  refused([](auto& l) { l.first_layer = ~0U; }, "first_layer is 4294967295, expected 0 to 5");
  refused([](auto& l) { l.total_layers = 2; }, "total_layers is 2, expected 3 to 2048");
  refused([](auto& l) { l.total_layers = max_layers + 1; }, "total_layers is 2049");
  refused([](auto& l) { l.total_layers = 0; }, "first_layer is 2, expected 0 where total_layers");
  const state_tensor state{"s", state_sharding::replicated, 1, 1, 0, 8, 8};
  refused(
      [&](auto& l) {
        l.states.assign(2, state);
        l.states[1].base = 8;
      },
      "state 1 name is 's', expected one that no other state has");
}

TEST(layer_parts, may_have_no_layer_of_a_group_which_a_whole_model_may_not) {
  auto layout = part(2, 5, 8);
  layout.groups = {{{0, 1, 2}, 0}, {{}, 0}};
  const auto fine = check(layout);
  EXPECT_TRUE(fine) << fine.error().message;
  EXPECT_TRUE(serves_layers(layout, 0));
  EXPECT_FALSE(serves_layers(layout, 1));
  EXPECT_EQ(decode(encode(layout)).value(), layout);
  auto all = part(0, 3, 3);
  all.groups = layout.groups;
  EXPECT_FALSE(check(all));
  EXPECT_TRUE(serves_layers(whole(3), 0));
}

TEST(layer_parts, travel) {
  for (const auto& layout :
       {part(2, 5, 8), part(0, 3, 8), part(5, 8, 8), part(0, 8, 8), whole(8)}) {
    const auto back = decode(encode(layout));
    ASSERT_TRUE(back) << back.error().message;
    EXPECT_EQ(*back, layout);
  }
}

/// Offset behind magic, version, dtype and five one-byte numbers.
constexpr std::size_t range_at = 4 + 1 + 1 + 4 + 5;

TEST(layer_parts, of_a_whole_model_are_encoded_as_before_there_were_any) {
  const auto bytes = encode(whole(8));
  EXPECT_EQ(bytes[range_at], std::byte{0});
  EXPECT_EQ(bytes[range_at + 1], std::byte{8});
  EXPECT_EQ(encode(part(2, 5, 8))[range_at], std::byte{3});
}

TEST(layer_parts, that_an_encoding_contradicts_are_refused) {
  const auto refused = [](std::uint8_t begin, std::uint8_t total) {
    auto bytes = encode(part(2, 5, 8));
    bytes[range_at] = std::byte{begin};
    bytes[range_at + 1] = std::byte{total};
    const auto back = decode(bytes);
    EXPECT_FALSE(back) << int{begin} << " " << int{total};
    return back ? errc::internal : back.error().code;
  };
  EXPECT_EQ(refused(0, 8), errc::invalid_config);  // all layers, but three are present
  EXPECT_EQ(refused(3, 0), errc::invalid_config);  // a model of no layers
  EXPECT_EQ(refused(3, 2), errc::invalid_config);  // fewer layers than are present
  EXPECT_EQ(refused(7, 8), errc::invalid_config);  // beyond the last
}

TEST(layer_parts, are_compared_in_the_layers_that_both_hold) {
  EXPECT_TRUE(check_compatible(part(0, 4, 8), part(4, 8, 8))) << "nothing in common";
  EXPECT_TRUE(check_compatible(part(2, 6, 8), whole(8)));
  const auto mismatch = [](const cache_layout& local, const cache_layout& remote,
                           std::initializer_list<const char*> words) {
    const auto ok = check_compatible(local, remote);
    ASSERT_FALSE(ok);
    EXPECT_EQ(ok.error().code, errc::layout_mismatch);
    for (const auto* word : words) EXPECT_THAT(ok.error().message, HasSubstr(word));
  };
  mismatch(part(2, 6, 8), whole(9), {"number of layers", "8", "9"});
  auto other = part(4, 8, 8);
  other.layers[1].shape.kv_heads = 2;  // layer 5 of the model
  mismatch(part(2, 6, 8), other, {"layer 5 kv_heads", "4", "2"});
  EXPECT_TRUE(check_compatible(part(0, 5, 8), other)) << "who does not hold layer 5 does not mind";
  auto here = part(0, 4, 8);
  auto there = part(2, 8, 8);
  here.groups = {{{0, 2}, 0}, {{1, 3}, 0}};
  there.groups = {{{0, 2, 4}, 0}, {{1, 3, 5}, 0}};
  EXPECT_TRUE(check_compatible(here, there));
  there.groups = {{{1, 3, 5}, 0}, {{0, 2, 4}, 0}};
  mismatch(here, there, {"layer 2 group", "is 0 here and 1"});
  there.groups = {{{0, 2, 4}, 0}, {{1, 3, 5}, 2}};
  mismatch(here, there, {"group 1 block_tokens", "4", "2"});
}

TEST(layer_parts, know_states_by_their_names) {
  const auto first = part(0, 4, 8, 0, 1, {"a", "b"});
  const auto second = part(4, 8, 8, 0, 1, {"c"});
  auto all = part(0, 8, 0, 0, 1, {"c", "a", "b"});
  EXPECT_TRUE(check_compatible(all, first));
  EXPECT_TRUE(check_compatible(first, second));
  using pairs = std::vector<std::pair<std::uint32_t, std::uint32_t>>;
  EXPECT_EQ(shared_states(first, all), (pairs{{0, 1}, {1, 2}}));
  EXPECT_EQ(shared_states(all, all), (pairs{{0, 0}, {1, 1}, {2, 2}}));
  EXPECT_TRUE(shared_states(first, second).empty());
  all.states[2].slot_bytes = 8;
  const auto other = check_compatible(first, all);
  ASSERT_FALSE(other);
  EXPECT_THAT(other.error().message,
              AllOf(HasSubstr("state 'b' bytes per request"), HasSubstr("16"), HasSubstr("8")));
  all.states[2].name = "a";
  const auto twice = check_compatible(first, all);
  ASSERT_FALSE(twice);
  EXPECT_THAT(twice.error().message, HasSubstr("state 'a' appears twice at the peer"));
}

TEST(layer_parts, have_no_state_that_all_layers_of_the_model_do_not_have) {
  const auto first = part(0, 4, 8, 0, 1, {"a", "b"});
  const auto all = part(0, 8, 0, 0, 1, {"c", "a"});
  const auto refused = [](const cache_layout& local, const cache_layout& remote,
                          const char* words) {
    const auto ok = check_compatible(local, remote);
    ASSERT_THAT(ok, fails_with(errc::layout_mismatch, HasSubstr(words))) << words;
  };
  refused(first, all, "state 'b' is missing at the peer");
  refused(all, first, "state 'b' is missing here");
  EXPECT_TRUE(check_compatible(first, part(4, 8, 8, 0, 1, {"c"}))) << "neither has all layers";
  EXPECT_TRUE(check_compatible(part(0, 4, 8, 0, 1, {"a"}), all));
}

TEST(layer_parts, of_one_model_have_one_fingerprint) {
  const auto said = fingerprint_of(part(0, 8, 8));
  for (const auto& layout : {part(0, 4, 8), part(4, 8, 8, 1, 2), part(2, 3, 8, 0, 4, {"s"})}) {
    EXPECT_EQ(fingerprint_of(layout), said);
  }
  EXPECT_NE(fingerprint_of(whole(8)), said) << "who says nothing of parts is compared whole";
  const auto differs = [&](auto change) {
    auto layout = part(0, 4, 8);
    change(layout);
    EXPECT_NE(fingerprint_of(layout), said);
  };
  differs([](auto& l) { l.total_layers = 9; });
  differs([](auto& l) { l.dtype = "fp16"; });
  differs([](auto& l) { l.block_tokens = 8; });
  differs([](auto& l) { l.model[3] = std::byte{1}; });
  differs([](auto& l) { l.groups = {{{0, 1, 2, 3}, 0}}; });
  auto grouped = part(0, 4, 8);
  grouped.groups = {{{0, 1, 2, 3}, 0}, {{}, 0}};
  auto window = part(4, 8, 8);
  window.groups = {{{0}, 0}, {{1, 2, 3}, 0}};
  EXPECT_EQ(fingerprint_of(grouped), fingerprint_of(window));
  window.groups[1].block_tokens = 2;
  EXPECT_NE(fingerprint_of(grouped), fingerprint_of(window));
}

TEST(layer_parts, stand_in_their_replica_as_their_layers_do) {
  const auto fits = [](const cache_layout& layout, std::uint32_t rank,
                       std::optional<std::uint32_t> ranks) {
    return !contradicts_rank(layout, rank, ranks);
  };
  EXPECT_TRUE(fits(part(0, 4, 8, 1, 2), 1, 4));
  EXPECT_TRUE(fits(part(4, 8, 8, 1, 2), 3, 4));
  EXPECT_TRUE(fits(part(2, 5, 8), 1, 3));
  EXPECT_TRUE(fits(part(2, 5, 8), 2, 5));
  EXPECT_TRUE(fits(part(4, 8, 8, 1, 2), 3, std::nullopt));
  EXPECT_TRUE(fits(part(0, 8, 0, 1, 2), 1, 2));
  EXPECT_TRUE(fits(part(0, 8, 8, 1, 2), 1, std::nullopt));
  EXPECT_FALSE(fits(part(0, 4, 8, 1, 2), 0, 4)) << "another tensor-parallel rank";
  EXPECT_FALSE(fits(part(0, 4, 8, 1, 2), 3, 4)) << "the first layers are of the first part";
  EXPECT_FALSE(fits(part(4, 8, 8, 1, 2), 1, 4)) << "and no others";
  EXPECT_FALSE(fits(part(4, 8, 8, 1, 2), 3, 6)) << "the last layers are of the last part";
  EXPECT_FALSE(fits(part(2, 5, 8), 1, 2)) << "and the last part has the last layers";
  EXPECT_FALSE(fits(part(0, 4, 8, 1, 2), 1, 3)) << "two parts of two ranks are four";
  EXPECT_FALSE(fits(part(2, 5, 8), 3, 6)) << "three parts before it would have two layers";
  EXPECT_FALSE(fits(part(2, 5, 8), 1, 6)) << "four parts behind it would have three layers";
  EXPECT_FALSE(fits(part(0, 8, 0, 1, 2), 1, 4)) << "a model that is not divided is one part";
  EXPECT_FALSE(fits(part(4, 8, 8), 0, std::nullopt));
  const auto why = contradicts_rank(part(4, 8, 8, 1, 2), 1, 4);
  EXPECT_THAT(why.value_or(""), HasSubstr("says rank 1 of 2 and layers 4 to 7 of the model's 8"));
  EXPECT_EQ(contradicts_rank(part(0, 8, 0, 1, 2), 0, 2), "says rank 1 of 2");
}

/// The sources are named a, b, c, ... in order.
result<void> covers(const cache_layout& destination, const std::vector<cache_layout>& sources) {
  static constexpr std::string_view names = "abcdefgh";
  std::vector<source_layout> all;
  for (std::size_t i = 0; i < sources.size(); ++i) all.push_back({names.substr(i, 1), &sources[i]});
  return check_covers(destination, all);
}

TEST(layer_parts, that_lack_a_layer_or_have_one_twice_are_no_replica) {
  const auto all = whole(8);
  EXPECT_TRUE(covers(all, {part(0, 3, 8), part(3, 8, 8)}));
  EXPECT_TRUE(covers(all, {part(3, 8, 8), part(0, 3, 8)})) << "in any order";
  EXPECT_TRUE(covers(part(5, 6, 8), {part(0, 3, 8, 1, 2), part(3, 8, 8, 0, 2), part(3, 8, 8, 1, 2),
                                     part(0, 3, 8, 0, 2)}));
  const auto refused = [&](const std::vector<cache_layout>& sources,
                           std::initializer_list<const char*> words) {
    const auto ok = covers(all, sources);
    ASSERT_FALSE(ok);
    EXPECT_EQ(ok.error().code, errc::layout_mismatch);
    for (const auto* word : words) EXPECT_THAT(ok.error().message, HasSubstr(word));
  };
  refused({}, {"layers 0 to 7 of the model's 8", "none of the sources"});
  refused({part(0, 3, 8)}, {"layers 3 to 7 of the model's 8", "none of the sources"});
  refused({part(3, 8, 8)}, {"layers 0 to 2 of the model's 8", "none of the sources"});
  refused({part(0, 3, 8), part(4, 8, 8)}, {"layer 3 of the model's 8", "none of the sources"});
  refused({part(0, 5, 8), part(3, 8, 8)}, {"layers 3 to 4 of the model's 8", "`a` and by `b`"});
  refused({part(0, 3, 8), part(3, 8, 8), part(3, 8, 8)}, {"layers 3 to 7", "`b` and by `c`"});
  refused({part(0, 3, 8, 0, 2), part(3, 8, 8, 0, 2), part(0, 3, 8, 1, 2)},
          {"layers 3 to 7", "tensor-parallel rank 1 of 2", "none of the sources"});
  refused({part(0, 3, 8, 0, 2), part(3, 8, 8)}, {"`a` has 2 tensor-parallel ranks", "`b` 1"});
  refused({part(0, 3, 8), part(3, 9, 9)}, {"`a` has 8 layers", "`b` 9"});
}

TEST(layer_parts, that_lack_a_state_or_have_one_twice_are_no_replica) {
  const auto wanted = part(0, 8, 0, 0, 1, {"x", "y"});
  EXPECT_TRUE(covers(wanted, {part(0, 3, 8, 0, 1, {"y"}), part(3, 8, 8, 0, 1, {"x"})}));
  const auto lacks = covers(wanted, {part(0, 3, 8, 0, 1, {"y"}), part(3, 8, 8)});
  ASSERT_THAT(lacks, fails_with(errc::layout_mismatch,
                                HasSubstr("state 'x' is held by none of the sources")));
  const auto twice = covers(wanted, {part(0, 3, 8, 0, 1, {"y", "x"}), part(3, 8, 8, 0, 1, {"x"})});
  ASSERT_FALSE(twice);
  EXPECT_THAT(twice.error().message, HasSubstr("state 'x' is held by `a` and by `b`"));
}

TEST(layer_parts, that_share_no_layer_move_nothing_and_are_granted_nothing) {
  const auto geometry =
      transfer_geometry::create(part(0, 4, 8), part(4, 8, 8), data_flow::to_remote).value();
  EXPECT_FALSE(geometry.moves_anything());
  EXPECT_EQ(geometry.layers(), 0U);
  EXPECT_FALSE(geometry.shares_table(0));
  const std::vector<block_id> blocks{block_id{0}, block_id{1}};
  EXPECT_EQ(geometry.plan({0, 0}, {0, 8}, blocks, blocks).value().bytes, 0U);
  EXPECT_EQ(geometry.plan({0, 1}, {0, 8}, blocks, blocks).error().code, errc::out_of_range);
  const auto granted = geometry.remote_map().bytes_of({0, 8}, blocks).value();
  for (const auto& region : granted) EXPECT_EQ(region.hull().length, 0U);
}

TEST(layer_parts, are_counted_from_the_first_layer_that_both_hold) {
  const auto geometry =
      transfer_geometry::create(part(1, 6, 8), part(4, 8, 8), data_flow::to_remote).value();
  EXPECT_EQ(geometry.layers(), 2U);
  EXPECT_EQ(geometry.first_local_layer(), 3U);
  EXPECT_EQ(geometry.first_remote_layer(), 0U);
  EXPECT_TRUE(geometry.shares_table(0));
  const std::vector<block_id> blocks{block_id{2}};
  const auto plan = geometry.plan({1, 2}, {0, 4}, blocks, blocks).value();
  const auto layout = part(1, 6, 8);
  EXPECT_EQ(plan.bytes, bytes_per_block(layout, 4));
  const auto& first = layout.layers[4].planes[0];
  EXPECT_EQ(plan.pieces.at(0).segments.at(0).local_offset, first.base + 2 * first.block_stride);
}

TEST(layer_parts, a_map_of_what_is_not_there_is_refused) {
  const auto layout = part(0, 4, 8);
  EXPECT_EQ(cache_map::create(layout, {{0, 5}, {}}).error().code, errc::out_of_range);
  EXPECT_EQ(cache_map::create(layout, {{3, 2}, {}}).error().code, errc::out_of_range);
  EXPECT_EQ(cache_map::create(layout, {{0, 4}, {0}}).error().code, errc::out_of_range);
  EXPECT_TRUE(cache_map::create(layout, {{1, 3}, {}}));
}

}  // namespace
}  // namespace troupe::kvcache
