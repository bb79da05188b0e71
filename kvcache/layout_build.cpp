// Builds the planes of the named arrangements.

#include <array>

#include "troupe/kvcache/layout.hpp"

namespace troupe::kvcache {
namespace {

constexpr std::uint64_t state_alignment = 64;

std::uint64_t align_up(std::uint64_t value, std::uint64_t alignment) noexcept {
  return (value + alignment - 1) / alignment * alignment;
}

/// Bytes of one block of each plane of a layer.
struct layer_size {
  std::array<std::uint64_t, 2> plane{0, 0};

  [[nodiscard]] std::uint64_t all() const noexcept { return plane[0] + plane[1]; }
};

std::vector<layer_size> layer_sizes(const cache_layout& layout) {
  std::vector<layer_size> sizes;
  sizes.reserve(layout.layers.size());
  for (const auto& layer : layout.layers) {
    layer_size size;
    for (std::size_t p = 0; p < layer.planes.size(); ++p) {
      const plane& at = layer.planes[p];
      size.plane[p] = std::uint64_t{layout.block_tokens} * at.heads * at.head_bytes;
    }
    sizes.push_back(size);
  }
  return sizes;
}

/// Adds planes without their places: heads, head bytes, strides inside a block.
void add_planes(cache_layout& layout, block_inner inner) {
  for (auto& layer : layout.layers) {
    plane p;
    const std::uint64_t element = element_size_of(layout, layer.shape);
    p.head_bytes = layer.shape.head_dim * element;
    switch (layer.shape.kind) {
      case layer_kind::attention:
        p.heads = head_range(layer.shape.kv_heads, layout.tp_size, layout.tp_rank).count();
        layer.planes.assign(2, p);
        if (layer.shape.value_dim != 0) {
          layer.planes[1].head_bytes = layer.shape.value_dim * element;
        }
        break;
      case layer_kind::mla: layer.planes.assign(1, p); break;
      case layer_kind::recurrent:
      case layer_kind::opaque: layer.planes.clear(); break;
    }
    for (auto& each : layer.planes) {
      const bool token_major = inner == block_inner::token_major;
      each.token_stride = token_major ? each.heads * each.head_bytes : each.head_bytes;
      each.head_stride = token_major ? each.head_bytes : layout.block_tokens * each.head_bytes;
    }
  }
}

void place_layers_first(cache_layout& layout, const arrangement& how) {
  const auto sizes = layer_sizes(layout);
  const bool own_region = how.regions == region_use::per_layer;
  const bool together = how.kv == kv_placement::together;
  std::uint64_t base = 0;
  std::uint32_t region = 0;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    auto& planes = layout.layers[i].planes;
    const layer_size& size = sizes[i];
    for (std::size_t p = 0; p < planes.size(); ++p) {
      planes[p].region = region;
      planes[p].block_stride = together ? size.all() : size.plane[p];
      planes[p].base = base + (p == 0 ? 0 : size.plane[0] * (together ? 1 : layout.blocks));
    }
    if (!own_region) {
      base += layout.blocks * size.all();
    } else if (!planes.empty()) {
      ++region;
    }
  }
}

void place_blocks_first(cache_layout& layout, kv_placement kv) {
  const auto sizes = layer_sizes(layout);
  std::uint64_t row[2] = {0, 0};  // bytes of all layers' first, and second, planes of a block
  for (const auto& size : sizes) {
    for (std::size_t p = 0; p < 2; ++p) row[p] += size.plane[p];
  }
  std::uint64_t before[2] = {0, 0};
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    auto& planes = layout.layers[i].planes;
    for (std::size_t p = 0; p < planes.size(); ++p) {
      const bool together = kv == kv_placement::together;
      const std::uint64_t second = together ? row[0] : layout.blocks * row[0];
      planes[p].block_stride = together ? row[0] + row[1] : row[p];
      planes[p].base = (p == 0 ? 0 : second) + before[p];
      before[p] += sizes[i].plane[p];
    }
  }
}

void place_block_interleaved(cache_layout& layout) {
  const std::uint64_t block = bytes_per_block(layout);
  const auto sizes = layer_sizes(layout);
  std::uint64_t base = 0;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    auto& planes = layout.layers[i].planes;
    for (std::size_t p = 0; p < planes.size(); ++p) {
      planes[p].block_stride = block;
      planes[p].base = base;
      base += sizes[i].plane[p];
    }
  }
}

void place_states(cache_layout& layout, const cache_shape& shape, region_use regions) {
  const auto used = region_sizes(layout);
  std::uint32_t region = 0;
  std::uint64_t base = 0;
  if (regions == region_use::per_layer) {
    region = static_cast<std::uint32_t>(used.size());
  } else if (!used.empty()) {
    base = used.front();
  }
  for (const auto& s : shape.states) {
    base = align_up(base, state_alignment);
    layout.states.push_back(
        {s.name, s.sharding, region, shape.state_slots, base, s.bytes, s.bytes});
    base += shape.state_slots * s.bytes;
  }
}

result<void> check_request(const cache_layout& layout, const cache_shape& shape,
                           const arrangement& how) {
  for (std::size_t i = 0; i < shape.layers.size(); ++i) {
    if (shape.layers[i].kind != layer_kind::opaque) continue;
    return fail(errc::invalid_config,
                "layout: layer " + std::to_string(i) +
                    " is opaque, so no arrangement with a name says where its bytes lie; give the "
                    "planes of each layer");
  }
  if (how.order == block_order::block_interleaved && how.kv == kv_placement::separate) {
    return fail(errc::invalid_config,
                "layout: block_interleaved puts K and V of a layer side by side; it cannot keep "
                "them separate, use blocks_first for that");
  }
  if (how.regions == region_use::per_layer && how.order != block_order::layers_first) {
    return fail(errc::invalid_config,
                "layout: a region per layer needs layers_first; a block of the other orders spans "
                "all layers");
  }
  // With unit strides each plane is legal on its own exactly when the shape's numbers are.
  cache_layout probe = layout;
  probe.blocks = layout.blocks == 0 ? 0 : 1;
  if (auto ok = check(probe); !ok) return ok;
  std::uint64_t total = 0;
  if (__builtin_mul_overflow(bytes_per_block(layout), layout.blocks, &total) ||
      total > max_offset / 2) {
    return fail(errc::invalid_config, "layout: " + std::to_string(layout.blocks) + " blocks of " +
                                          std::to_string(bytes_per_block(layout)) +
                                          " bytes are more than any memory");
  }
  if (shape.states.size() > max_states) {
    return fail(errc::invalid_config, "layout: number of states is " +
                                          std::to_string(shape.states.size()) + ", expected 0 to " +
                                          std::to_string(max_states));
  }
  for (const auto& s : shape.states) {
    if (s.bytes > max_offset / max_ranks ||
        __builtin_mul_overflow(s.bytes, shape.state_slots, &total) ||
        total > max_offset / 2 / max_states) {
      return fail(errc::invalid_config,
                  "layout: state '" + s.name + "' of " + std::to_string(s.bytes) + " bytes for " +
                      std::to_string(shape.state_slots) + " requests is more than any memory");
    }
  }
  return {};
}

}  // namespace

std::vector<layer_shape> attention_layers(std::uint32_t count, std::uint32_t kv_heads,
                                          std::uint32_t head_dim) {
  return std::vector<layer_shape>(count, {layer_kind::attention, kv_heads, head_dim});
}

std::vector<layer_shape> mla_layers(std::uint32_t count, std::uint32_t latent_dim) {
  return std::vector<layer_shape>(count, {layer_kind::mla, 0, latent_dim});
}

result<cache_layout> make_layout(const cache_shape& shape, const arrangement& how) {
  cache_layout layout;
  layout.dtype = shape.dtype;
  layout.element_size = shape.element_size != 0 ? shape.element_size : dtype_size(shape.dtype);
  layout.block_tokens = shape.block_tokens;
  layout.blocks = shape.blocks;
  layout.tp_rank = shape.tp_rank;
  layout.tp_size = shape.tp_size;
  layout.first_layer = shape.first_layer;
  layout.total_layers = shape.total_layers;
  layout.layers.reserve(shape.layers.size());
  for (const auto& layer : shape.layers) layout.layers.push_back({layer, {}});
  add_planes(layout, how.inner);
  if (auto ok = check_request(layout, shape, how); !ok) return fail(ok.error());
  switch (how.order) {
    case block_order::layers_first: place_layers_first(layout, how); break;
    case block_order::blocks_first: place_blocks_first(layout, how.kv); break;
    case block_order::block_interleaved: place_block_interleaved(layout); break;
  }
  place_states(layout, shape, how.regions);
  if (auto ok = check(layout); !ok) return fail(ok.error());
  return layout;
}

}  // namespace troupe::kvcache
