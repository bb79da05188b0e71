// Moves real bytes. For any layouts, parallel sizes, prefix and blocks, the segments of all source
// ranks together put every byte of every destination rank in its place, once, and touch nothing
// else.

#include <cstring>
#include <map>
#include <numeric>

#include <gtest/gtest.h>

#include "troupe/kvcache/plan.hpp"

#include "random_layouts.hpp"
#include "sanitized.hpp"

namespace troupe::kvcache {
namespace {

using testing::dice;

std::uint8_t truth(std::uint64_t layer, std::uint64_t plane, std::uint64_t token,
                   std::uint64_t head, std::uint64_t byte) {
  std::uint64_t x = layer * 1'000'003 + plane;
  x = x * 1'000'033 + token;
  x = x * 1'000'037 + head;
  x = x * 1'000'039 + byte;
  x ^= x >> 29U;
  x *= 0xbf58476d1ce4e5b9ULL;
  return static_cast<std::uint8_t>(x >> 56U);
}

/// One rank with real memory, and how often each byte was written.
struct rank_memory {
  cache_layout layout;
  std::vector<block_id> blocks;
  std::vector<std::vector<std::uint8_t>> bytes;
  std::vector<std::vector<std::uint8_t>> writes;

  void allocate(dice& d, std::uint64_t request_blocks) {
    for (const auto size : region_sizes(layout)) {
      bytes.emplace_back(size, std::uint8_t{0xEE});
      writes.emplace_back(size, std::uint8_t{0});
    }
    std::vector<std::uint32_t> ids(layout.blocks);
    std::iota(ids.begin(), ids.end(), 0U);
    if (!d.one_in(3)) {  // else consecutive, to have runs
      for (std::size_t i = ids.size(); i > 1; --i) {
        if (d.one_in(2)) std::swap(ids[i - 1], ids[d.roll<std::size_t>(0, i - 1)]);
      }
    }
    for (std::uint64_t i = 0; i < request_blocks; ++i) blocks.push_back(block_id{ids[i]});
  }

  /// Calls `f(layer, plane, token, model's head, byte, region, offset)` for each byte.
  template <class F>
  void each_byte(token_range tokens, layer_range layers, F f) const {
    for (std::uint32_t l = layers.begin; l < layers.end; ++l) {
      const auto& layer = layout.layers[l];
      const bool sharded = layer.shape.kind == layer_kind::attention;
      const auto first =
          sharded ? head_range(layer.shape.kv_heads, layout.tp_size, layout.tp_rank).begin : 0;
      for (std::size_t p = 0; p < layer.planes.size(); ++p) {
        const plane& at = layer.planes[p];
        for (std::uint64_t t = tokens.begin; t < tokens.end; ++t) {
          const auto block = blocks[t / layout.block_tokens].value;
          for (std::uint32_t h = 0; h < at.heads; ++h) {
            const std::uint64_t offset = at.base + block * at.block_stride +
                                         (t % layout.block_tokens) * at.token_stride +
                                         h * at.head_stride;
            for (std::uint64_t b = 0; b < at.head_bytes; ++b) {
              f(l, p, t, first + h, b, at.region, offset + b);
            }
          }
        }
      }
    }
  }
};

struct scene {
  std::vector<rank_memory> sources;
  std::vector<rank_memory> destinations;
  std::uint64_t request_tokens{0};
};

scene make_scene(dice& d) {
  scene s;
  const cache_shape model = testing::random_model(d);
  const auto request_blocks = d.roll<std::uint64_t>(1, 7);
  s.request_tokens = request_blocks * model.block_tokens - d.roll(0, model.block_tokens - 1);
  const auto side = [&](std::vector<rank_memory>& ranks) {
    const auto size = d.roll(1, 8);
    const auto how = testing::random_arrangement(d);
    const bool unnamed = d.one_in(5);
    const auto blocks = static_cast<std::uint32_t>(request_blocks) + d.roll(0, 4);
    for (std::uint32_t r = 0; r < size; ++r) {
      ranks.emplace_back();
      ranks.back().layout = testing::random_layout(model, blocks, r, size, how, unnamed, d);
      ranks.back().allocate(d, request_blocks);
    }
  };
  side(s.sources);
  side(s.destinations);
  for (auto& source : s.sources) {
    source.each_byte({0, s.request_tokens}, {0, static_cast<std::uint32_t>(model.layers.size())},
                     [&](auto l, auto p, auto t, auto h, auto b, auto region, auto offset) {
                       source.bytes[region][offset] = truth(l, p, t, h, b);
                     });
  }
  return s;
}

void move_bytes(const rank_memory& source, rank_memory& destination, const transfer_plan& plan,
                data_flow flow) {
  std::uint64_t total = 0;
  std::uint64_t segments = 0;
  std::map<std::pair<std::uint32_t, std::uint32_t>, int> seen;
  for (const auto& piece : plan.pieces) {
    ASSERT_EQ((++seen[{piece.local_region, piece.remote_region}]), 1);
    ASSERT_FALSE(piece.segments.empty());
    const bool out = flow == data_flow::to_remote;
    const auto& from = source.bytes[out ? piece.local_region : piece.remote_region];
    const auto to_region = out ? piece.remote_region : piece.local_region;
    auto& to = destination.bytes[to_region];
    ASSERT_TRUE(check_local(piece.segments, out ? from.size() : to.size()));
    ASSERT_TRUE(check_remote(piece.segments, out ? to.size() : from.size()));
    total += total_bytes(piece.segments);
    segments += piece.segments.size();
    for (const auto& s : piece.segments) {
      for (std::uint32_t i = 0; i < s.count; ++i) {
        const auto local = s.local_offset + i * s.local_stride;
        const auto remote = s.remote_offset + i * s.remote_stride;
        const auto source_at = out ? local : remote;
        const auto target_at = out ? remote : local;
        std::memcpy(&to[target_at], &from[source_at], s.length);
        for (std::uint64_t b = 0; b < s.length; ++b) {
          ++destination.writes[to_region][target_at + b];
        }
      }
    }
  }
  ASSERT_EQ(total, plan.bytes);
  ASSERT_EQ(segments, plan.segments_after);
  ASSERT_LE(plan.segments_after, plan.segments_before);
}

void transfer(scene& s, token_range tokens, layer_range layers, dice& d) {
  for (std::uint32_t to = 0; to < s.destinations.size(); ++to) {
    auto& destination = s.destinations[to];
    const auto sources =
        sources_for(destination.layout, static_cast<std::uint32_t>(s.sources.size()),
                    static_cast<std::uint32_t>(s.destinations.size()), to);
    for (std::uint32_t from = 0; from < s.sources.size(); ++from) {
      const auto& source = s.sources[from];
      const bool out = d.one_in(2);
      const auto flow = out ? data_flow::to_remote : data_flow::to_local;
      const auto& local = out ? source : destination;
      const auto& remote = out ? destination : source;
      const auto geometry = transfer_geometry::create(local.layout, remote.layout, flow);
      ASSERT_TRUE(geometry) << geometry.error().message;
      const auto plan = geometry->plan(layers, tokens, local.blocks, remote.blocks);
      ASSERT_TRUE(plan) << plan.error().message;
      const bool designated = std::find(sources.begin(), sources.end(), from) != sources.end();
      ASSERT_EQ(geometry->moves_anything(), designated);
      const auto targets = targets_for(source.layout, static_cast<std::uint32_t>(s.sources.size()),
                                       static_cast<std::uint32_t>(s.destinations.size()), from);
      ASSERT_EQ(std::find(targets.begin(), targets.end(), to) != targets.end(), designated);
      move_bytes(source, destination, *plan, flow);
    }
  }
}

/// Expects that every byte of these tokens and layers arrived once, and `expected_bytes` in all, so
/// nothing else did.
void expect_arrived(const scene& s, token_range tokens, layer_range layers) {
  for (const auto& destination : s.destinations) {
    std::uint64_t expected = 0;
    destination.each_byte(tokens, layers,
                          [&](auto l, auto p, auto t, auto h, auto b, auto region, auto offset) {
                            ++expected;
                            ASSERT_EQ(destination.bytes[region][offset], truth(l, p, t, h, b));
                            ASSERT_EQ(destination.writes[region][offset], 1);
                          });
    std::uint64_t written = 0;
    for (const auto& region : destination.writes) {
      for (const auto count : region) written += count;
    }
    ASSERT_EQ(written, expected);
  }
}

TEST(plan_property, all_sources_together_fill_every_destination_byte_once_and_touch_nothing_else) {
  for (std::uint64_t seed = 1; seed <= troupe::testing::tries(6000U); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    dice d{seed};
    scene s = make_scene(d);
    const auto model_layers = static_cast<std::uint32_t>(s.sources[0].layout.layers.size());
    const token_range tokens{d.one_in(2) ? 0 : d.roll<std::uint64_t>(0, s.request_tokens),
                             s.request_tokens};
    const layer_range layers{d.one_in(2) ? 0 : d.roll(0, model_layers), model_layers};
    transfer(s, tokens, layers, d);
    expect_arrived(s, tokens, layers);
    if (HasFatalFailure()) return;
  }
}

TEST(plan_property, chunks_and_single_layers_add_up_to_the_whole) {
  for (std::uint64_t seed = 10'001; seed <= 10'000 + troupe::testing::tries(2000U); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    dice d{seed};
    scene s = make_scene(d);
    const auto model_layers = static_cast<std::uint32_t>(s.sources[0].layout.layers.size());
    const auto prefix = d.roll<std::uint64_t>(0, s.request_tokens);
    for (std::uint64_t at = prefix; at < s.request_tokens;) {
      const auto until = at + d.roll<std::uint64_t>(1, s.request_tokens - at);
      for (std::uint32_t layer = 0; layer < model_layers; ++layer) {
        transfer(s, {at, until}, {layer, layer + 1}, d);
      }
      at = until;
    }
    expect_arrived(s, {prefix, s.request_tokens}, {0, model_layers});
    if (HasFatalFailure()) return;
  }
}

TEST(plan_property, both_sides_plan_the_same_bytes) {
  for (std::uint64_t seed = 20'001; seed <= 20'000 + troupe::testing::tries(2000U); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    dice d{seed};
    scene s = make_scene(d);
    const auto& source = s.sources[d.roll<std::size_t>(0, s.sources.size() - 1)];
    const auto& destination = s.destinations[d.roll<std::size_t>(0, s.destinations.size() - 1)];
    const auto sends =
        transfer_geometry::create(source.layout, destination.layout, data_flow::to_remote).value();
    const auto pulls =
        transfer_geometry::create(destination.layout, source.layout, data_flow::to_local).value();
    const token_range tokens{d.roll<std::uint64_t>(0, s.request_tokens), s.request_tokens};
    const auto a =
        sends.plan({0, sends.layers()}, tokens, source.blocks, destination.blocks).value();
    const auto b =
        pulls.plan({0, pulls.layers()}, tokens, destination.blocks, source.blocks).value();
    EXPECT_EQ(a.bytes, b.bytes);
    EXPECT_EQ(a.bytes, sends.bytes_of({0, sends.layers()}, tokens));
    EXPECT_EQ(a.segments_before, b.segments_before);
  }
}

TEST(plan_property, a_grant_permits_the_bytes_of_its_tokens_and_no_other) {
  for (std::uint64_t seed = 30'001; seed <= 30'000 + troupe::testing::tries(3000U); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    dice d{seed};
    scene s = make_scene(d);
    auto& rank = s.sources[d.roll<std::size_t>(0, s.sources.size() - 1)];
    const auto& peer = s.destinations[0];
    const auto geometry =
        transfer_geometry::create(rank.layout, peer.layout, data_flow::to_remote).value();
    token_range tokens{d.roll<std::uint64_t>(0, s.request_tokens), s.request_tokens};
    if (d.one_in(3)) tokens.end = d.roll<std::uint64_t>(tokens.begin, tokens.end);
    // As a request names its blocks: starting with the first one that moves.
    const auto first = tokens.begin / rank.layout.block_tokens;
    const block_list blocks{
        std::span{rank.blocks}.subspan(std::min<std::size_t>(first, rank.blocks.size())), first};
    const auto granted = geometry.local_map().bytes_of(tokens, blocks);
    ASSERT_TRUE(granted) << granted.error().message;

    const auto layers = static_cast<std::uint32_t>(rank.layout.layers.size());
    rank.each_byte(tokens, {0, layers},
                   [&](auto, auto, auto, auto, auto, auto region, auto offset) {
                     ++rank.writes[region][offset];
                   });
    ASSERT_EQ(granted->size(), rank.bytes.size());
    for (std::size_t region = 0; region < rank.bytes.size(); ++region) {
      ASSERT_TRUE((*granted)[region].check_within(rank.bytes[region].size()));
      for (std::uint64_t at = 0; at < rank.bytes[region].size(); ++at) {
        ASSERT_EQ((*granted)[region].covers({at, 1, 0, 1}), rank.writes[region][at] != 0)
            << "region " << region << " byte " << at;
      }
    }

    const auto plan = geometry.plan({0, layers}, tokens, blocks, peer.blocks).value();
    for (const auto& piece : plan.pieces) {
      for (const auto& g : piece.segments) {
        ASSERT_TRUE((*granted)[piece.local_region].covers(
            {g.local_offset, g.length, g.local_stride, g.count}));
      }
    }
  }
}

}  // namespace
}  // namespace troupe::kvcache
