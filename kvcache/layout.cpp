#include "troupe/kvcache/layout.hpp"

#include <algorithm>
#include <array>
#include <set>
#include <string_view>
#include <utility>

#include "troupe/kvcache/layer_parts.hpp"

namespace troupe::kvcache {
namespace {

constexpr std::uint32_t max_element_size = 64;
constexpr std::size_t max_dtype_name = 32;
constexpr std::size_t max_state_name = 64;

/// The least and the most planes of a layer of that kind.
std::pair<std::size_t, std::size_t> planes_of(layer_kind kind) noexcept {
  switch (kind) {
    case layer_kind::attention: return {2, 2};
    case layer_kind::mla: return {1, 1};
    case layer_kind::recurrent: break;
    case layer_kind::opaque: return {1, 2};
  }
  return {0, 0};
}

bool has_heads(const layer_shape& shape) noexcept {
  return shape.kind == layer_kind::attention || shape.unit == opaque_unit::block_head;
}

unexpected refuse(const std::string& what, const std::string& found, const std::string& expected) {
  return fail(errc::invalid_config, "layout: " + what + " is " + found + ", expected " + expected);
}

result<void> in_range(const std::string& what, std::uint64_t value, std::uint64_t low,
                      std::uint64_t high) {
  if (value >= low && value <= high) return {};
  return refuse(what, std::to_string(value), std::to_string(low) + " to " + std::to_string(high));
}

struct dimension {
  std::uint64_t count;
  std::uint64_t stride;
};

/// One past the last byte of the nested repetitions, or nothing when it passes `max_offset`.
bool end_within_limit(std::uint64_t base, std::span<const dimension> dimensions,
                      std::uint64_t length) {
  std::uint64_t end = base;
  for (const auto& d : dimensions) {
    if (d.count < 2) continue;
    std::uint64_t reach = 0;
    if (__builtin_mul_overflow(d.count - 1, d.stride, &reach) || reach > max_offset ||
        end > max_offset) {
      return false;
    }
    end += reach;
  }
  return end <= max_offset && length <= max_offset - end;
}

/// Whether each stride, smallest first, is at least the extent of all smaller ones.
bool strides_nest(std::span<const dimension> dimensions, std::uint64_t length) {
  std::vector<dimension> sorted;
  for (const auto& d : dimensions) {
    if (d.count > 1) sorted.push_back(d);
  }
  std::sort(sorted.begin(), sorted.end(),
            [](const dimension& a, const dimension& b) { return a.stride < b.stride; });
  std::uint64_t reach = length;
  for (const auto& d : sorted) {
    if (d.stride < reach) return false;
    reach += (d.count - 1) * d.stride;
  }
  return true;
}

/// Checks that the bytes of one head agree with the shape.
result<void> check_head_bytes(const cache_layout& layout, const layer_shape& shape, const plane& p,
                              std::size_t index, const std::string& name) {
  if (shape.kind == layer_kind::opaque) {
    if (p.token_stride != 0) {
      return refuse(name + " token_stride", std::to_string(p.token_stride),
                    "0: tokens of an opaque block have no places");
    }
    return in_range(name + " head_bytes", p.head_bytes, 1, max_opaque_bytes);
  }
  const bool is_value = index == 1 && shape.value_dim != 0;
  const std::uint64_t elements = is_value ? shape.value_dim : shape.head_dim;
  const std::uint64_t bytes = elements * element_size_of(layout, shape);
  if (p.head_bytes == bytes) return {};
  return refuse(name + " head_bytes", std::to_string(p.head_bytes),
                std::to_string(bytes) + (is_value ? " (value_dim times element size)"
                                                  : " (head_dim times element size)"));
}

/// How often the heads of a plane of that layer repeat within a block.
std::uint64_t rows_of_block(const cache_layout& layout, std::size_t layer) noexcept {
  if (layout.layers[layer].shape.kind == layer_kind::opaque) return 1;
  return block_tokens_of(layout, table_of(layout, static_cast<std::uint32_t>(layer)));
}

result<void> check_plane(const cache_layout& layout, std::size_t layer, std::size_t index,
                         const std::string& name) {
  const layer_shape& shape = layout.layers[layer].shape;
  const plane& p = layout.layers[layer].planes[index];
  const std::uint32_t heads =
      has_heads(shape) ? head_range(shape.kv_heads, layout.tp_size, layout.tp_rank).count() : 1;
  if (p.heads != heads) {
    return refuse(name + " heads", std::to_string(p.heads),
                  std::to_string(heads) + " for rank " + std::to_string(layout.tp_rank) + " of " +
                      std::to_string(layout.tp_size));
  }
  if (auto ok = check_head_bytes(layout, shape, p, index, name); !ok) return ok;
  if (p.region >= max_regions) {
    return refuse(name + " region", std::to_string(p.region),
                  "less than " + std::to_string(max_regions));
  }
  const std::array<dimension, 3> dimensions{{{layout.blocks, p.block_stride},
                                             {rows_of_block(layout, layer), p.token_stride},
                                             {p.heads, p.head_stride}}};
  if (!end_within_limit(p.base, dimensions, p.head_bytes)) {
    return refuse(name + " end", "beyond any memory", "at most 2^60 bytes; check base and strides");
  }
  if (!strides_nest(dimensions, p.head_bytes)) {
    return refuse(name + " strides",
                  "block " + std::to_string(p.block_stride) + ", token " +
                      std::to_string(p.token_stride) + ", head " + std::to_string(p.head_stride),
                  "strides that keep every head of every token apart");
  }
  return {};
}

result<void> check_type(const std::string& name, const std::string& dtype, std::uint32_t size) {
  if (dtype.empty() || dtype.size() > max_dtype_name) {
    return refuse(name + "dtype name", std::to_string(dtype.size()) + " bytes long", "1 to 32");
  }
  if (auto ok = in_range(name + "element size", size, 1, max_element_size); !ok) return ok;
  if (const auto known = dtype_size(dtype); known != 0 && known != size) {
    return refuse(name + "element size", std::to_string(size),
                  std::to_string(known) + " for " + dtype);
  }
  return {};
}

/// Checks the fields that only opaque layers have.
result<void> check_opaque(const layer_shape& shape, const std::string& name) {
  const bool opaque = shape.kind == layer_kind::opaque;
  const auto unit = static_cast<unsigned>(shape.unit);
  if (auto ok = in_range(name + " unit", unit, opaque ? 1 : 0, opaque ? 2 : 0); !ok) return ok;
  const auto length = shape.packing.size();
  if (length >= (opaque ? 1U : 0U) && length <= (opaque ? max_packing : 0)) return {};
  return refuse(name + " packing", std::to_string(length) + " bytes long",
                opaque ? "1 to 32: bytes that only the engine understands have a name"
                       : "none: only opaque layers have one");
}

result<void> check_shape(const layer_shape& shape, const std::string& name) {
  const auto heads = [&](bool any) {
    return in_range(name + " kv_heads", shape.kv_heads, any ? 1 : 0, any ? max_heads : 0);
  };
  const auto value_dim = [&](std::uint64_t most) {
    return in_range(name + " value_dim", shape.value_dim, 0, most);
  };
  if (auto ok = check_opaque(shape, name); !ok) return ok;
  if (!shape.dtype.empty()) {
    if (auto ok = check_type(name + " ", shape.dtype, shape.element_size); !ok) return ok;
  } else if (auto ok = in_range(name + " element size", shape.element_size, 0, 0); !ok) {
    return ok;
  }
  switch (shape.kind) {
    case layer_kind::attention:
      if (auto ok = heads(true); !ok) return ok;
      if (auto ok = value_dim(max_head_dim); !ok) return ok;
      return in_range(name + " head_dim", shape.head_dim, 1, max_head_dim);
    case layer_kind::mla:
      if (auto ok = heads(false); !ok) return ok;
      if (auto ok = value_dim(0); !ok) return ok;
      return in_range(name + " latent_dim", shape.head_dim, 1, max_head_dim);
    case layer_kind::opaque:
    case layer_kind::recurrent:  // without a unit, as `check_opaque` has found
      if (auto ok = heads(shape.unit == opaque_unit::block_head); !ok) return ok;
      if (auto ok = value_dim(0); !ok) return ok;
      return in_range(name + " head_dim", shape.head_dim, 0, 0);
  }
  return refuse(name + " kind", std::to_string(static_cast<unsigned>(shape.kind)), "1 to 4");
}

result<void> check_layer(const cache_layout& layout, std::size_t index) {
  const layer_layout& layer = layout.layers[index];
  const std::string name = "layer " + std::to_string(index);
  if (auto ok = check_shape(layer.shape, name); !ok) return ok;
  const auto [least, most] = planes_of(layer.shape.kind);
  if (layer.planes.size() < least || layer.planes.size() > most) {
    return refuse(name + " planes", std::to_string(layer.planes.size()),
                  (least == most ? std::to_string(most) : std::string{"1 or 2"}) + " for kind " +
                      std::string{to_string(layer.shape.kind)});
  }
  for (std::size_t p = 0; p < layer.planes.size(); ++p) {
    const std::string plane_name = name + " plane " + std::to_string(p);
    if (auto ok = check_plane(layout, index, p, plane_name); !ok) return ok;
  }
  return {};
}

result<void> check_sharding(state_sharding sharding, const std::string& name) {
  return in_range(name + " sharding", static_cast<unsigned>(sharding), 1, 2);
}

result<void> check_parts(const state_tensor& state, const std::string& name) {
  if (auto ok = in_range(name + " parts", state.parts.size(), 0, max_state_parts); !ok) return ok;
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < state.parts.size(); ++i) {
    const std::string part = name + " part " + std::to_string(i);
    if (auto ok = check_sharding(state.parts[i].sharding, part); !ok) return ok;
    if (auto ok = in_range(part + " bytes", state.parts[i].bytes, 1, state.slot_bytes); !ok) {
      return ok;
    }
    sum += state.parts[i].bytes;
  }
  if (state.parts.empty() || sum == state.slot_bytes) return {};
  return refuse(name + " slot_bytes", std::to_string(state.slot_bytes),
                "the sum of its parts, " + std::to_string(sum));
}

result<void> check_state(const state_tensor& state, std::size_t index) {
  const std::string name = "state " + std::to_string(index);
  if (state.name.empty() || state.name.size() > max_state_name) {
    return refuse(name + " name", std::to_string(state.name.size()) + " bytes long", "1 to 64");
  }
  if (auto ok = check_sharding(state.sharding, name); !ok) return ok;
  if (state.region >= max_regions) {
    return refuse(name + " region", std::to_string(state.region),
                  "less than " + std::to_string(max_regions));
  }
  if (auto ok = in_range(name + " slots", state.slots, 1, 0xffff'ffffU); !ok) return ok;
  if (auto ok = in_range(name + " slot_bytes", state.slot_bytes, 1, max_offset / max_ranks); !ok) {
    return ok;
  }
  if (auto ok = check_parts(state, name); !ok) return ok;
  const std::array<dimension, 1> slots{{{state.slots, state.slot_stride}}};
  if (!end_within_limit(state.base, slots, state.slot_bytes)) {
    return refuse(name + " end", "beyond any memory", "at most 2^60 bytes; check base and stride");
  }
  if (!strides_nest(slots, state.slot_bytes)) {
    return refuse(name + " slot_stride", std::to_string(state.slot_stride),
                  "at least slot_bytes, " + std::to_string(state.slot_bytes));
  }
  return {};
}

/// Checks the range of the model's layers.
result<void> check_range(const cache_layout& layout) {
  const auto count = layout.layers.size();
  if (layout.total_layers == 0) {
    if (layout.first_layer == 0) return {};
    return refuse("first_layer", std::to_string(layout.first_layer),
                  "0 where total_layers is 0: all layers of the model are here");
  }
  if (auto ok = in_range("total_layers", layout.total_layers, count, max_layers); !ok) return ok;
  return in_range("first_layer", layout.first_layer, 0, layout.total_layers - count);
}

/// The states of a part are matched by name, so names must be unique.
result<void> check_state_names(const cache_layout& layout) {
  if (!is_part(layout)) return {};
  std::set<std::string_view> seen;
  for (std::size_t i = 0; i < layout.states.size(); ++i) {
    if (seen.insert(layout.states[i].name).second) continue;
    return refuse("state " + std::to_string(i) + " name", "'" + layout.states[i].name + "'",
                  "one that no other state has: a part of a model knows them by their names");
  }
  return {};
}

/// Each layer with planes must be in exactly one group, and no other layer. In a part, a group may
/// be empty.
result<void> check_groups(const cache_layout& layout) {
  if (layout.groups.empty()) return {};
  if (auto ok = in_range("number of groups", layout.groups.size(), 1, max_layer_groups); !ok) {
    return ok;
  }
  std::vector<bool> seen(layout.layers.size(), false);
  for (std::size_t g = 0; g < layout.groups.size(); ++g) {
    const layer_group& group = layout.groups[g];
    const std::string name = "group " + std::to_string(g);
    if (auto ok = in_range(name + " block_tokens", group.block_tokens, 0, max_block_tokens); !ok) {
      return ok;
    }
    const std::uint64_t least = is_part(layout) ? 0 : 1;
    if (auto ok = in_range(name + " layers", group.layers.size(), least, layout.layers.size());
        !ok) {
      return ok;
    }
    std::uint64_t from = 0;
    for (const auto layer : group.layers) {
      if (auto ok = in_range(name + " layer", layer, from, layout.layers.size() - 1); !ok)
        return ok;
      from = std::uint64_t{layer} + 1;
      if (seen[layer]) {
        return refuse(name + " layer", std::to_string(layer), "one that no other group has");
      }
      if (layout.layers[layer].shape.kind == layer_kind::recurrent) {
        return refuse(name + " layer", std::to_string(layer),
                      "one that keeps something per token; this one is recurrent");
      }
      seen[layer] = true;
    }
  }
  for (std::size_t i = 0; i < layout.layers.size(); ++i) {
    if (seen[i] || layout.layers[i].shape.kind == layer_kind::recurrent) continue;
    return refuse(
        "layer " + std::to_string(i) + " group", "none",
        "one: where there are groups, each layer that keeps something per token is in one");
  }
  return {};
}

std::uint64_t layer_block_bytes(const cache_layout& layout, std::size_t layer) noexcept {
  std::uint64_t heads = 0;
  for (const auto& p : layout.layers[layer].planes) heads += p.heads * p.head_bytes;
  return rows_of_block(layout, layer) * heads;
}

}  // namespace

std::string_view to_string(layer_kind kind) noexcept {
  switch (kind) {
    case layer_kind::attention: return "attention";
    case layer_kind::mla: return "mla";
    case layer_kind::recurrent: return "recurrent";
    case layer_kind::opaque: return "opaque";
  }
  return "unknown";
}

std::uint32_t element_size_of(const cache_layout& layout, const layer_shape& shape) noexcept {
  return shape.element_size != 0 ? shape.element_size : layout.element_size;
}

std::vector<state_part> parts_of(const state_tensor& state) {
  if (!state.parts.empty()) return state.parts;
  return {{state.slot_bytes, state.sharding}};
}

std::uint32_t block_tables(const cache_layout& layout) noexcept {
  return layout.groups.empty() ? 1 : static_cast<std::uint32_t>(layout.groups.size());
}

std::uint32_t table_of(const cache_layout& layout, std::uint32_t layer) noexcept {
  for (std::uint32_t g = 0; g < layout.groups.size(); ++g) {
    if (std::ranges::binary_search(layout.groups[g].layers, layer)) return g;
  }
  return 0;
}

bool serves_layers(const cache_layout& layout, std::uint32_t table) noexcept {
  return layout.groups.empty() || !layout.groups[table].layers.empty();
}

std::uint32_t block_tokens_of(const cache_layout& layout, std::uint32_t table) noexcept {
  const bool own = table < layout.groups.size() && layout.groups[table].block_tokens != 0;
  return own ? layout.groups[table].block_tokens : layout.block_tokens;
}

head_span head_range(std::uint32_t heads, std::uint32_t ranks, std::uint32_t rank) noexcept {
  if (heads == 0 || rank >= ranks) return {};
  const auto first = static_cast<std::uint32_t>(std::uint64_t{rank} * heads / ranks);
  if (ranks > heads) return {first, first + 1};
  return {first, static_cast<std::uint32_t>((std::uint64_t{rank} + 1) * heads / ranks)};
}

std::uint32_t dtype_size(std::string_view name) noexcept {
  struct known {
    std::string_view name;
    std::uint32_t size;
  };
  constexpr std::array<known, 5> types{
      {{"fp8", 1}, {"int8", 1}, {"fp16", 2}, {"bf16", 2}, {"fp32", 4}}};
  for (const auto& type : types) {
    if (type.name == name) return type.size;
  }
  return 0;
}

result<void> check(const cache_layout& layout) {
  if (auto ok = check_type("", layout.dtype, layout.element_size); !ok) return ok;
  if (auto ok = in_range("block_tokens", layout.block_tokens, 1, max_block_tokens); !ok) return ok;
  if (auto ok = in_range("blocks", layout.blocks, 1, 0xffff'ffffU); !ok) return ok;
  if (auto ok = in_range("tp_size", layout.tp_size, 1, max_ranks); !ok) return ok;
  if (auto ok = in_range("tp_rank", layout.tp_rank, 0, layout.tp_size - 1); !ok) return ok;
  if (auto ok = in_range("number of layers", layout.layers.size(), 1, max_layers); !ok) return ok;
  if (auto ok = in_range("number of states", layout.states.size(), 0, max_states); !ok) return ok;
  if (auto ok = check_range(layout); !ok) return ok;
  if (auto ok = check_groups(layout); !ok) return ok;
  for (std::size_t i = 0; i < layout.layers.size(); ++i) {
    if (auto ok = check_layer(layout, i); !ok) return ok;
  }
  for (std::size_t i = 0; i < layout.states.size(); ++i) {
    if (auto ok = check_state(layout.states[i], i); !ok) return ok;
  }
  return check_state_names(layout);
}

std::uint64_t bytes_per_block(const cache_layout& layout, std::uint32_t layer) noexcept {
  return layer < layout.layers.size() ? layer_block_bytes(layout, layer) : 0;
}

std::uint64_t bytes_per_block(const cache_layout& layout) noexcept {
  std::array<std::uint64_t, max_layer_groups> sums{};
  for (std::uint32_t i = 0; i < layout.layers.size(); ++i) {
    sums[table_of(layout, i)] += layer_block_bytes(layout, i);
  }
  return *std::ranges::max_element(sums);
}

std::uint64_t bytes_per_state(const cache_layout& layout) noexcept {
  std::uint64_t sum = 0;
  for (const auto& state : layout.states) sum += state.slot_bytes;
  return sum;
}

std::vector<std::uint64_t> region_sizes(const cache_layout& layout) {
  std::vector<std::uint64_t> sizes;
  const auto reach = [&sizes](std::uint32_t region, std::uint64_t end) {
    if (region >= sizes.size()) sizes.resize(std::size_t{region} + 1);
    sizes[region] = std::max(sizes[region], end);
  };
  for (std::size_t i = 0; i < layout.layers.size(); ++i) {
    for (const auto& p : layout.layers[i].planes) {
      const std::uint64_t tokens = rows_of_block(layout, i) - 1;
      reach(p.region, p.base + (layout.blocks - std::uint64_t{1}) * p.block_stride +
                          tokens * p.token_stride + (p.heads - std::uint64_t{1}) * p.head_stride +
                          p.head_bytes);
    }
  }
  for (const auto& s : layout.states) {
    reach(s.region, s.base + (s.slots - std::uint64_t{1}) * s.slot_stride + s.slot_bytes);
  }
  return sizes;
}

result<region_bytes> locate(const cache_layout& layout, const block_list& blocks,
                            const cache_place& place) {
  const auto missing = [](const std::string& what, std::uint64_t number, std::uint64_t count) {
    return fail(errc::out_of_range,
                what + " " + std::to_string(number) + " of " + std::to_string(count));
  };
  if (place.layer >= layout.layers.size())
    return missing("layer", place.layer, layout.layers.size());
  const auto& planes = layout.layers[place.layer].planes;
  if (place.plane >= planes.size()) {
    return missing("layer " + std::to_string(place.layer) + ": plane", place.plane, planes.size());
  }
  const auto& plane = planes[place.plane];
  if (place.head >= plane.heads) {
    return missing("layer " + std::to_string(place.layer) + ": head", place.head, plane.heads);
  }
  const auto block_tokens = block_tokens_of(layout, table_of(layout, place.layer));
  const auto number = place.token / block_tokens;
  if (number < blocks.first || number >= blocks.end()) {
    return missing("token", place.token, std::uint64_t{block_tokens} * blocks.end());
  }
  if (blocks[number].value >= layout.blocks)
    return missing("block", blocks[number].value, layout.blocks);
  return region_bytes{plane.region,
                      plane.offset_of(blocks[number], place.token % block_tokens, place.head),
                      plane.head_bytes};
}

}  // namespace troupe::kvcache
