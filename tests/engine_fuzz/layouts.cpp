// How the cache of a node lies in its regions.

#include <algorithm>

#include "scenario.hpp"

namespace troupe::engine_fuzz {

namespace {

/// Spreads the states, with gaps between their slots.
void spread_states(kvcache::cache_layout& layout, std::uint32_t region, dice& d) {
  std::uint64_t at = d.roll(0, 9);
  for (auto& state : layout.states) {
    state.region = region;
    state.base = at;
    state.slot_stride = state.slot_bytes + d.roll(0, 9);
    at += state.slot_stride * state.slots + d.roll(0, 9);
  }
}

/// A region per layer, [block][token][K or V][head], with gaps between everything.
void spread(kvcache::cache_layout& layout, std::uint64_t seed) {
  dice d{seed};
  std::uint32_t region = 0;
  for (auto& layer : layout.layers) {
    if (layer.planes.empty()) continue;
    const std::uint64_t gap = d.roll(0, 5);
    const std::uint64_t base = d.roll(0, 9);
    const auto bytes = layer.planes[0].head_bytes;
    const auto head = bytes + (d.one_in(2) ? gap : 0);
    const auto row = head * layer.planes[0].heads;
    const auto token = row * layer.planes.size() + gap;
    for (std::size_t p = 0; p < layer.planes.size(); ++p) {
      layer.planes[p] = {region,         layer.planes[p].heads,
                         base + p * row, token * layout.block_tokens + gap,
                         token,          head,
                         bytes};
    }
    ++region;
  }
  spread_states(layout, region, d);
}

/// Makes a layer opaque: only the engine understands the bytes of its blocks. A block has as many
/// bytes as its tokens had.
void make_opaque(kvcache::layer_layout& layer, std::uint32_t block_tokens) {
  for (auto& p : layer.planes) {
    p.head_bytes *= block_tokens;
    p.token_stride = 0;
  }
  layer.shape = {kvcache::layer_kind::opaque, layer.shape.kv_heads};
  layer.shape.unit = kvcache::opaque_unit::block_head;
  layer.shape.packing = "of the fuzzer";
}

/// Moves the layer into a region of its own, [block][head][K or V].
void pack(kvcache::cache_layout& layout, std::uint32_t index) {
  const auto region = static_cast<std::uint32_t>(kvcache::region_sizes(layout).size());
  auto& layer = layout.layers[index];
  make_opaque(layer, layout.block_tokens);
  std::uint64_t head_bytes = 0;
  for (auto& p : layer.planes) {
    p.region = region;
    p.base = head_bytes;
    head_bytes += p.head_bytes;
  }
  for (auto& p : layer.planes) {
    p.head_stride = head_bytes;
    p.block_stride = head_bytes * p.heads;
  }
}

/// Packing may leave a region empty, and an empty region is refused.
void leave_out_empty_regions(kvcache::cache_layout& layout) {
  std::vector<std::uint32_t> numbers;
  std::uint32_t next = 0;
  for (const auto size : kvcache::region_sizes(layout))
    numbers.push_back(size == 0 ? next : next++);
  for (auto& layer : layout.layers) {
    for (auto& p : layer.planes) p.region = numbers[p.region];
  }
  for (auto& state : layout.states) state.region = numbers[state.region];
}

// -- groups of layers

/// Layers that lie one behind the other in a block.
using layer_row = std::vector<std::uint32_t>;

/// A cache may have at most this many pieces that do not touch.
constexpr std::uint64_t most_pieces = 100'000;

class group_placer {
 public:
  group_placer(kvcache::cache_layout& layout, const scenario& s, const side& its,
               std::uint64_t seed)
      : layout_{layout}, s_{s}, its_{its}, dice_{seed} {
    if (count_pieces() < most_pieces && dice_.one_in(2)) gap_ = dice_.roll(1, 5);
  }

  void place_all() {
    for (std::uint32_t pool = 0; pool < layout_.groups.size(); ++pool) {
      const auto rows = rows_of(pool);
      if (rows.empty()) continue;
      if (dice_.one_in(2)) {
        place(rows);
      } else {
        place_by_number(rows);
      }
    }
    spread_states(layout_, region_, dice_);
  }

 private:
  [[nodiscard]] std::uint64_t rows_of_block(std::uint32_t layer) const {
    const bool opaque = layout_.layers[layer].shape.kind == kvcache::layer_kind::opaque;
    return opaque ? 1 : s_.block_tokens(s_.table_of(layer));
  }

  [[nodiscard]] std::uint64_t count_pieces() const {
    std::uint64_t pieces = 0;
    for (std::uint32_t l = 0; l < layout_.layers.size(); ++l) {
      for (const auto& p : layout_.layers[l].planes) pieces += p.heads * rows_of_block(l);
    }
    return pieces;
  }

  /// The layers of each group of that pool.
  [[nodiscard]] std::vector<layer_row> rows_of(std::uint32_t pool) const {
    std::vector<layer_row> rows;
    for (std::uint32_t g = 0; g < layout_.groups.size(); ++g) {
      if (its_.pools[g] == pool) rows.push_back(layout_.groups[g].layers);
    }
    return rows;
  }

  /// Places the first layers of all groups over the same bytes, then the second ones, and so on.
  void place_by_number(const std::vector<layer_row>& rows) {
    for (std::size_t number = 0;; ++number) {
      std::vector<layer_row> these;
      for (const auto& row : rows) {
        if (number < row.size()) these.push_back({row[number]});
      }
      if (these.empty()) return;
      place(these);
    }
  }

  /// Places all rows over the same bytes of one region. A block is as long as the longest row's.
  void place(const std::vector<layer_row>& rows) {
    const std::uint64_t base = dice_.roll(0, 9);
    std::uint64_t stride = 0;
    for (const auto& row : rows) {
      std::uint64_t at = 0;
      for (const auto layer : row) {
        for (auto& p : layout_.layers[layer].planes) {
          p.region = region_;
          p.base = base + at;
          at += arrange(p, layer);
        }
      }
      stride = std::max(stride, at);
    }
    if (dice_.one_in(2)) stride += dice_.roll(0, 9);
    for (const auto& row : rows) {
      for (const auto layer : row) {
        for (auto& p : layout_.layers[layer].planes) p.block_stride = stride;
      }
    }
    ++region_;
  }

  /// Arranges a plane within a block and returns the bytes that it takes there.
  std::uint64_t arrange(kvcache::plane& p, std::uint32_t layer) {
    const auto rows = rows_of_block(layer);
    const auto piece = p.head_bytes + gap_;
    const bool opaque = layout_.layers[layer].shape.kind == kvcache::layer_kind::opaque;
    const bool heads_inside = its_.how.inner == kvcache::block_inner::token_major;
    p.head_stride = heads_inside ? piece : piece * rows;
    p.token_stride = opaque ? 0 : heads_inside ? piece * p.heads : piece;
    return piece * p.heads * rows;
  }

  kvcache::cache_layout& layout_;
  const scenario& s_;
  const side& its_;
  dice dice_;
  std::uint64_t gap_{0};
  std::uint32_t region_{0};
};

/// Gives the layers block tables of their own.
void group_layers(kvcache::cache_layout& layout, const scenario& s, std::uint32_t node) {
  layout.groups = s.groups;
  for (auto& group : layout.groups) {
    // Both forms mean the same.
    if (group.block_tokens == layout.block_tokens && node % 2 == 0) group.block_tokens = 0;
  }
  for (std::uint32_t l = 0; l < layout.layers.size(); ++l) {
    if (s.is_packed(l)) make_opaque(layout.layers[l], s.block_tokens(s.table_of(l)));
  }
  group_placer{layout, s, s.side_of(node), s.seed + node}.place_all();
}

// -- states

/// The bytes of one rank's share of a state part, given the part's size in the whole replica.
std::uint64_t bytes_of_rank(const kvcache::state_part& part, std::uint32_t ranks) {
  return part.sharding == kvcache::state_sharding::sliced ? part.bytes / ranks : part.bytes;
}

kvcache::cache_shape shape_of(const scenario& s, const side& its, std::uint32_t rank) {
  auto shape = s.model;
  shape.blocks = std::max(its.blocks, 1U);
  shape.tp_rank = rank;
  shape.tp_size = its.ranks;
  for (std::size_t i = 0; i < shape.states.size(); ++i) {
    auto& state = shape.states[i];
    // Up to here `bytes` is that of the whole replica.
    auto parts = s.parts_of(i);
    if (parts.empty()) parts.push_back({state.bytes, state.sharding});
    state.bytes = 0;
    for (const auto& part : parts) state.bytes += bytes_of_rank(part, its.ranks);
  }
  return shape;
}

void add_parts(kvcache::cache_layout& layout, const scenario& s, std::uint32_t ranks) {
  for (std::size_t i = 0; i < layout.states.size(); ++i) {
    layout.states[i].parts = s.parts_of(i);
    for (auto& part : layout.states[i].parts) part.bytes = bytes_of_rank(part, ranks);
  }
}

}  // namespace

kvcache::cache_layout scenario::layout_of(std::uint32_t node) const {
  const auto& its = side_of(node);
  auto layout = kvcache::make_layout(shape_of(*this, its, rank_of(node)), its.how).value();
  add_parts(layout, *this, its.ranks);
  if (!groups.empty()) {
    group_layers(layout, *this, node);
    return layout;
  }
  if (its.unnamed) spread(layout, seed + node);
  for (std::uint32_t l = 0; l < layout.layers.size(); ++l) {
    if (is_packed(l)) pack(layout, l);
  }
  leave_out_empty_regions(layout);
  return layout;
}

}  // namespace troupe::engine_fuzz
