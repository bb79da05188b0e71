#include "troupe/kvcache/layout.hpp"

#include <algorithm>

#include "troupe/deploy/c/handles.hpp"

using namespace troupe;
using namespace troupe::c;

namespace {

result<kvcache::layer_shape> shape_of(const troupe_layer_shape& given) {
  if (auto kind =
          in_range(given.kind, TROUPE_LAYER_ATTENTION, TROUPE_LAYER_RECURRENT, "shape.kind");
      !kind)
    return fail(kind.error());
  return kvcache::layer_shape{static_cast<kvcache::layer_kind>(given.kind), given.kv_heads,
                              given.head_dim};
}

/// All of a layout but its layers and states.
result<kvcache::cache_layout> geometry_of(const troupe_cache_geometry* given) {
  const auto geometry = read(given, "geometry");
  if (!geometry) return fail(geometry.error());
  auto dtype = text(geometry->dtype, "geometry.dtype");
  if (!dtype) return fail(dtype.error());
  kvcache::cache_layout out;
  out.element_size = geometry->element_size ? geometry->element_size : kvcache::dtype_size(*dtype);
  if (out.element_size == 0) {
    std::string why{"`geometry.element_size` is 0 and the size of `"};
    return bad_argument(why.append(*dtype).append("` is not known; give it in bytes"));
  }
  out.dtype = std::move(*dtype);
  out.block_tokens = geometry->block_tokens;
  out.blocks = geometry->blocks;
  out.tp_rank = geometry->tp_rank;
  out.tp_size = geometry->tp_size ? geometry->tp_size : 1;
  return out;
}

kvcache::plane plane_of(const troupe_plane& p) {
  return {p.region, p.heads, p.base, p.block_stride, p.token_stride, p.head_stride, p.head_bytes};
}

troupe_plane plane_of(const kvcache::plane& p) {
  return {p.region, p.heads, p.base, p.block_stride, p.token_stride, p.head_stride, p.head_bytes};
}

}  // namespace

troupe_status troupe_layout_make(const troupe_cache_geometry* geometry,
                                 const troupe_layer_shape* layers, size_t layer_count,
                                 const troupe_arrangement* how, troupe_layout** layout) {
  return guarded([&]() -> result<void> {
    if (auto out = present(layout, "layout"); !out) return out;
    const auto base = geometry_of(geometry);
    if (!base) return fail(base.error());
    if (auto given = present(layers, "layers"); !given) return given;
    if (layer_count > kvcache::max_layers) return bad_argument("`layer_count` is more than 2048");
    kvcache::cache_shape shape{.dtype = base->dtype,
                               .element_size = base->element_size,
                               .block_tokens = base->block_tokens,
                               .blocks = base->blocks,
                               .tp_rank = base->tp_rank,
                               .tp_size = base->tp_size};
    for (size_t i = 0; i < layer_count; ++i) {
      auto one = shape_of(layers[i]);
      if (!one) return fail(one.error());
      shape.layers.push_back(*one);
    }
    kvcache::arrangement arrangement;
    if (how) {
      if (auto order = in_range(how->order, 0, TROUPE_BLOCK_INTERLEAVED, "how.order"); !order)
        return order;
      if (auto kv = in_range(how->kv, 0, TROUPE_KV_SEPARATE, "how.kv"); !kv) return kv;
      if (auto inner = in_range(how->inner, 0, TROUPE_HEAD_MAJOR, "how.inner"); !inner)
        return inner;
      if (auto regions = in_range(how->regions, 0, TROUPE_REGION_PER_LAYER, "how.regions");
          !regions)
        return regions;
      arrangement = {static_cast<kvcache::block_order>(how->order),
                     static_cast<kvcache::kv_placement>(how->kv),
                     static_cast<kvcache::block_inner>(how->inner),
                     static_cast<kvcache::region_use>(how->regions)};
    }
    auto made = kvcache::make_layout(shape, arrangement);
    if (!made) return fail(made.error());
    *layout = new troupe_layout{std::move(*made)};
    return {};
  });
}

troupe_status troupe_layout_new(const troupe_cache_geometry* geometry, troupe_layout** layout) {
  return guarded([&]() -> result<void> {
    if (auto out = present(layout, "layout"); !out) return out;
    auto base = geometry_of(geometry);
    if (!base) return fail(base.error());
    *layout = new troupe_layout{std::move(*base)};
    return {};
  });
}

troupe_status troupe_layout_add_layer(troupe_layout* layout, const troupe_layer_shape* shape,
                                      const troupe_plane* planes, size_t plane_count) {
  return guarded([&]() -> result<void> {
    if (auto to = present(layout, "layout"); !to) return to;
    if (auto given = present(shape, "shape"); !given) return given;
    const auto known = shape_of(*shape);
    if (!known) return fail(known.error());
    if (plane_count > 2)
      return bad_argument("`plane_count` is more than 2; a layer has K and V, a latent, or none");
    if (plane_count != 0)
      if (auto given = present(planes, "planes"); !given) return given;
    if (layout->layout.layers.size() >= kvcache::max_layers)
      return bad_argument("the layout has 2048 layers already, the most that there can be");
    kvcache::layer_layout layer{*known, {}};
    for (size_t i = 0; i < plane_count; ++i) layer.planes.push_back(plane_of(planes[i]));
    layout->layout.layers.push_back(std::move(layer));
    return {};
  });
}

troupe_status troupe_layout_add_state(troupe_layout* layout, const troupe_state_tensor* state) {
  return guarded([&]() -> result<void> {
    if (auto to = present(layout, "layout"); !to) return to;
    const auto given = read(state, "state");
    if (!given) return fail(given.error());
    auto name = text(given->name, "state.name");
    if (!name) return fail(name.error());
    if (auto known = in_range(given->sharding, TROUPE_STATE_REPLICATED, TROUPE_STATE_SLICED,
                              "state.sharding");
        !known)
      return known;
    if (layout->layout.states.size() >= kvcache::max_states)
      return bad_argument("the layout has 4096 state tensors already, the most that there can be");
    layout->layout.states.push_back(
        {std::move(*name), static_cast<kvcache::state_sharding>(given->sharding), given->region,
         given->slots, given->base, given->slot_stride, given->slot_bytes});
    return {};
  });
}

troupe_status troupe_layout_check(const troupe_layout* layout) {
  return guarded([&]() -> result<void> {
    if (auto given = present(layout, "layout"); !given) return given;
    return kvcache::check(layout->layout);
  });
}

troupe_status troupe_layout_validate(const troupe_layout* layout, const uint64_t* region_sizes,
                                     size_t count) {
  return guarded([&]() -> result<void> {
    if (auto given = present(layout, "layout"); !given) return given;
    if (count > kvcache::max_regions) return bad_argument("`count` is more than 4096 regions");
    if (count != 0)
      if (auto given = present(region_sizes, "region_sizes"); !given) return given;
    return kvcache::validate(layout->layout, std::span{region_sizes, count});
  });
}

troupe_status troupe_layout_compatible(const troupe_layout* local, const troupe_layout* remote) {
  return guarded([&]() -> result<void> {
    if (auto given = present(local, "local"); !given) return given;
    if (auto given = present(remote, "remote"); !given) return given;
    for (const auto* each : {local, remote})
      if (auto fine = kvcache::check(each->layout); !fine) return fine;
    return kvcache::check_compatible(local->layout, remote->layout);
  });
}

troupe_status troupe_layout_geometry(const troupe_layout* layout, troupe_cache_geometry* geometry) {
  return guarded([&]() -> result<void> {
    if (auto given = present(layout, "layout"); !given) return given;
    if (auto out = writable(geometry, "geometry"); !out) return out;
    const auto& known = layout->layout;
    write({0, known.element_size, known.dtype.c_str(), known.block_tokens, known.blocks,
           known.tp_rank, known.tp_size},
          geometry);
    return {};
  });
}

troupe_status troupe_layout_layer_count(const troupe_layout* layout, uint32_t* count) {
  return guarded([&]() -> result<void> {
    if (auto given = present(layout, "layout"); !given) return given;
    if (auto out = present(count, "count"); !out) return out;
    *count = static_cast<uint32_t>(layout->layout.layers.size());
    return {};
  });
}

troupe_status troupe_layout_layer(const troupe_layout* layout, uint32_t layer,
                                  troupe_layer_shape* shape, troupe_plane* planes, size_t capacity,
                                  size_t* plane_count) {
  return guarded([&]() -> result<void> {
    if (auto given = present(layout, "layout"); !given) return given;
    if (auto out = present(shape, "shape"); !out) return out;
    if (auto out = present(plane_count, "plane_count"); !out) return out;
    if (capacity != 0)
      if (auto out = present(planes, "planes"); !out) return out;
    const auto& layers = layout->layout.layers;
    if (layer >= layers.size()) {
      std::string why{"there is no layer "};
      why.append(std::to_string(layer))
          .append("; the layout has ")
          .append(std::to_string(layers.size()));
      return fail(errc::out_of_range, std::move(why));
    }
    const auto& known = layers[layer];
    *shape = {static_cast<uint32_t>(known.shape.kind), known.shape.kv_heads, known.shape.head_dim};
    for (size_t i = 0; i < std::min(capacity, known.planes.size()); ++i)
      planes[i] = plane_of(known.planes[i]);
    *plane_count = known.planes.size();
    return {};
  });
}

troupe_status troupe_layout_region_sizes(const troupe_layout* layout, uint64_t* sizes,
                                         size_t capacity, size_t* count) {
  return guarded([&]() -> result<void> {
    if (auto given = present(layout, "layout"); !given) return given;
    if (auto out = present(count, "count"); !out) return out;
    if (capacity != 0)
      if (auto out = present(sizes, "sizes"); !out) return out;
    if (auto fine = kvcache::check(layout->layout); !fine) return fine;
    const auto known = kvcache::region_sizes(layout->layout);
    std::copy_n(known.begin(), std::min(capacity, known.size()), sizes);
    *count = known.size();
    return {};
  });
}

troupe_status troupe_layout_locate(const troupe_layout* layout, const uint32_t* given_blocks,
                                   size_t block_count, const troupe_cache_place* place,
                                   troupe_region_bytes* bytes) {
  return guarded([&]() -> result<void> {
    if (auto given = present(layout, "layout"); !given) return given;
    if (auto given = present(place, "place"); !given) return given;
    if (auto out = present(bytes, "bytes"); !out) return out;
    const auto ids = blocks(given_blocks, block_count, "blocks");
    if (!ids) return fail(ids.error());
    if (auto fine = kvcache::check(layout->layout); !fine) return fine;
    const auto found = kvcache::locate(layout->layout, *ids,
                                       {place->layer, place->plane, place->token, place->head});
    if (!found) return fail(found.error());
    *bytes = {found->region, 0, found->offset, found->length};
    return {};
  });
}

troupe_status troupe_layout_encode(const troupe_layout* layout, void** bytes, size_t* byte_count) {
  return guarded([&]() -> result<void> {
    if (auto given = present(layout, "layout"); !given) return given;
    if (auto out = present(bytes, "bytes"); !out) return out;
    if (auto out = present(byte_count, "byte_count"); !out) return out;
    if (auto fine = kvcache::check(layout->layout); !fine) return fine;
    const auto encoded = kvcache::encode(layout->layout);
    *bytes = copy_for_c(encoded.data(), encoded.size());
    *byte_count = encoded.size();
    return {};
  });
}

troupe_status troupe_layout_decode(const void* given_bytes, size_t byte_count,
                                   troupe_layout** layout) {
  return guarded([&]() -> result<void> {
    if (auto out = present(layout, "layout"); !out) return out;
    const auto given = bytes(given_bytes, byte_count, "bytes");
    if (!given) return fail(given.error());
    auto known = kvcache::decode(*given);
    if (!known) return fail(known.error());
    *layout = new troupe_layout{std::move(*known)};
    return {};
  });
}

void troupe_layout_free(troupe_layout* layout) {
  delete layout;
}
