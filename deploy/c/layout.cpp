#include "troupe/kvcache/layout.hpp"

#include <algorithm>
#include <array>
#include <cstring>

#include "troupe/deploy/c/handles.hpp"
#include "troupe/kvcache/layout_fingerprint.hpp"

using namespace troupe;
using namespace troupe::c;

namespace {

/// Bytes of one element: as given, or the type's known size.
result<std::uint32_t> size_of_element(std::uint32_t given, const std::string& dtype,
                                      std::string_view name) {
  const std::uint32_t size = given ? given : kvcache::dtype_size(dtype);
  if (size != 0) return size;
  std::string why{"`"};
  why.append(name).append("` is 0 and the size of `").append(dtype);
  return bad_argument(why.append("` is not known; give it in bytes"));
}

/// `more` may be NULL.
result<kvcache::layer_shape> shape_of(const troupe_layer_shape& given,
                                      const troupe_layer_details* more) {
  if (auto kind = in_range(given.kind, TROUPE_LAYER_ATTENTION, TROUPE_LAYER_OPAQUE, "shape.kind");
      !kind)
    return fail(kind.error());
  kvcache::layer_shape out;
  out.kind = static_cast<kvcache::layer_kind>(given.kind);
  out.kv_heads = given.kv_heads;
  out.head_dim = given.head_dim;
  if (!more) return out;
  const auto details = read(more, "details");
  if (!details) return fail(details.error());
  if (auto unit = in_range(details->unit, 0, TROUPE_OPAQUE_BLOCK, "details.unit"); !unit)
    return fail(unit.error());
  auto dtype = optional_text(details->dtype, "details.dtype");
  if (!dtype) return fail(dtype.error());
  auto packing = optional_text(details->packing, "details.packing");
  if (!packing) return fail(packing.error());
  out.value_dim = details->value_dim;
  out.element_size = details->element_size;
  if (!dtype->empty()) {
    const auto size = size_of_element(details->element_size, *dtype, "details.element_size");
    if (!size) return fail(size.error());
    out.element_size = *size;
  }
  out.dtype = std::move(*dtype);
  out.unit = static_cast<kvcache::opaque_unit>(details->unit);
  out.packing = std::move(*packing);
  return out;
}

/// `guarded`, with the layout of a handle that is not NULL.
template <class Handle, class Call>
troupe_status on_layout(Handle* layout, const Call& call) {
  return guarded([&]() -> result<void> {
    if (auto given = present(layout, "layout"); !given) return given;
    return call(layout->layout);
  });
}

/// Checks that the layer exists.
result<void> check_layer(const kvcache::cache_layout& layout, std::uint32_t layer) {
  const auto layers = layout.layers.size();
  if (layer < layers) return {};
  std::string why{"there is no layer "};
  why.append(std::to_string(layer)).append("; the layout has ").append(std::to_string(layers));
  return fail(errc::out_of_range, std::move(why));
}

/// The layout without its layers and states.
result<kvcache::cache_layout> geometry_of(const troupe_cache_geometry* given) {
  const auto geometry = read(given, "geometry");
  if (!geometry) return fail(geometry.error());
  auto dtype = text(geometry->dtype, "geometry.dtype");
  if (!dtype) return fail(dtype.error());
  const auto size = size_of_element(geometry->element_size, *dtype, "geometry.element_size");
  if (!size) return fail(size.error());
  kvcache::cache_layout out;
  out.element_size = *size;
  out.dtype = std::move(*dtype);
  out.block_tokens = geometry->block_tokens;
  out.blocks = geometry->blocks;
  out.tp_rank = geometry->tp_rank;
  out.tp_size = geometry->tp_size ? geometry->tp_size : 1;
  if (geometry->model) std::memcpy(out.model.data(), geometry->model, out.model.size());
  return out;
}

result<std::vector<kvcache::state_part>> parts_of(const troupe_state_tensor& state) {
  std::vector<kvcache::state_part> parts;
  if (state.reserved != 0) return bad_argument("`state.reserved` is not 0");
  if (state.part_count == 0) return parts;
  if (auto given = present(state.parts, "state.parts"); !given) return fail(given.error());
  if (state.part_count > kvcache::max_state_parts)
    return bad_argument("`state.part_count` is more than 64");
  for (std::uint32_t i = 0; i < state.part_count; ++i) {
    const auto& part = state.parts[i];
    const auto name = "state.parts[" + std::to_string(i) + "]";
    if (auto known = in_range(part.sharding, TROUPE_STATE_REPLICATED, TROUPE_STATE_SLICED,
                              name + ".sharding");
        !known)
      return fail(known.error());
    if (part.reserved != 0) return bad_argument("`" + name + ".reserved` is not 0");
    parts.push_back({part.bytes, static_cast<kvcache::state_sharding>(part.sharding)});
  }
  return parts;
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
  return troupe_layout_make_with(geometry, layers, nullptr, layer_count, how, layout);
}

troupe_status troupe_layout_make_with(const troupe_cache_geometry* geometry,
                                      const troupe_layer_shape* layers,
                                      const troupe_layer_details* const* details,
                                      size_t layer_count, const troupe_arrangement* how,
                                      troupe_layout** layout) {
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
      auto one = shape_of(layers[i], details ? details[i] : nullptr);
      if (!one) return fail(one.error());
      shape.layers.push_back(std::move(*one));
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
    made->model = base->model;
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
  return troupe_layout_add_layer_with(layout, shape, nullptr, planes, plane_count);
}

troupe_status troupe_layout_add_layer_with(troupe_layout* layout, const troupe_layer_shape* shape,
                                           const troupe_layer_details* details,
                                           const troupe_plane* planes, size_t plane_count) {
  return on_layout(layout, [&](auto& cache) -> result<void> {
    if (auto given = present(shape, "shape"); !given) return given;
    auto known = shape_of(*shape, details);
    if (!known) return fail(known.error());
    if (plane_count > 2)
      return bad_argument("`plane_count` is more than 2; a layer has two, one or none");
    if (plane_count != 0)
      if (auto given = present(planes, "planes"); !given) return given;
    if (cache.layers.size() >= kvcache::max_layers)
      return bad_argument("the layout has 2048 layers already, the most that there can be");
    kvcache::layer_layout layer{std::move(*known), {}};
    for (size_t i = 0; i < plane_count; ++i) layer.planes.push_back(plane_of(planes[i]));
    cache.layers.push_back(std::move(layer));
    return {};
  });
}

troupe_status troupe_layout_add_state(troupe_layout* layout, const troupe_state_tensor* state) {
  return on_layout(layout, [&](auto& cache) -> result<void> {
    const auto given = read(state, "state");
    if (!given) return fail(given.error());
    auto name = text(given->name, "state.name");
    if (!name) return fail(name.error());
    if (auto known = in_range(given->sharding, TROUPE_STATE_REPLICATED, TROUPE_STATE_SLICED,
                              "state.sharding");
        !known)
      return known;
    if (cache.states.size() >= kvcache::max_states)
      return bad_argument("the layout has 4096 state tensors already, the most that there can be");
    auto parts = parts_of(*given);
    if (!parts) return fail(parts.error());
    cache.states.push_back({std::move(*name), static_cast<kvcache::state_sharding>(given->sharding),
                            given->region, given->slots, given->base, given->slot_stride,
                            given->slot_bytes, std::move(*parts)});
    return {};
  });
}

troupe_status troupe_layout_check(const troupe_layout* layout) {
  return on_layout(layout, [&](auto& cache) -> result<void> { return kvcache::check(cache); });
}

troupe_status troupe_layout_validate(const troupe_layout* layout, const uint64_t* region_sizes,
                                     size_t count) {
  return on_layout(layout, [&](auto& cache) -> result<void> {
    if (count > kvcache::max_regions) return bad_argument("`count` is more than 4096 regions");
    if (count != 0)
      if (auto given = present(region_sizes, "region_sizes"); !given) return given;
    return kvcache::validate(cache, std::span{region_sizes, count});
  });
}

troupe_status troupe_layout_compatible(const troupe_layout* local, const troupe_layout* remote) {
  return guarded([&]() -> result<void> {
    if (auto given = present({{local, "local"}, {remote, "remote"}}); !given) return given;
    for (const auto* each : {local, remote})
      if (auto fine = kvcache::check(each->layout); !fine) return fine;
    return kvcache::check_compatible(local->layout, remote->layout);
  });
}

troupe_status troupe_layout_geometry(const troupe_layout* layout, troupe_cache_geometry* geometry) {
  return on_layout(layout, [&](auto& cache) -> result<void> {
    if (auto out = writable(geometry, "geometry"); !out) return out;
    const bool says_model = cache.model != std::array<std::byte, 32>{};
    write({0, cache.element_size, cache.dtype.c_str(), cache.block_tokens, cache.blocks,
           cache.tp_rank, cache.tp_size,
           says_model ? reinterpret_cast<const uint8_t*>(cache.model.data()) : nullptr},
          geometry);
    return {};
  });
}

troupe_status troupe_layout_layer_count(const troupe_layout* layout, uint32_t* count) {
  return on_layout(layout, [&](auto& cache) -> result<void> {
    if (auto out = present(count, "count"); !out) return out;
    *count = static_cast<uint32_t>(cache.layers.size());
    return {};
  });
}

troupe_status troupe_layout_layer(const troupe_layout* layout, uint32_t layer,
                                  troupe_layer_shape* shape, troupe_plane* planes, size_t capacity,
                                  size_t* plane_count) {
  return on_layout(layout, [&](auto& cache) -> result<void> {
    if (auto out = present({{shape, "shape"}, {plane_count, "plane_count"}}); !out) return out;
    if (capacity != 0)
      if (auto out = present(planes, "planes"); !out) return out;
    if (auto there = check_layer(cache, layer); !there) return there;
    const auto& known = cache.layers[layer];
    *shape = {static_cast<uint32_t>(known.shape.kind), known.shape.kv_heads, known.shape.head_dim};
    for (size_t i = 0; i < std::min(capacity, known.planes.size()); ++i)
      planes[i] = plane_of(known.planes[i]);
    *plane_count = known.planes.size();
    return {};
  });
}

troupe_status troupe_layout_layer_details(const troupe_layout* layout, uint32_t layer,
                                          troupe_layer_details* details) {
  return on_layout(layout, [&](auto& cache) -> result<void> {
    if (auto out = writable(details, "details"); !out) return out;
    if (auto there = check_layer(cache, layer); !there) return there;
    const auto& known = cache.layers[layer].shape;
    write({0, known.value_dim, known.element_size, static_cast<uint32_t>(known.unit),
           known.dtype.c_str(), known.packing.c_str()},
          details);
    return {};
  });
}

troupe_status troupe_layout_add_group(troupe_layout* layout, const uint32_t* layers,
                                      size_t layer_count, uint32_t block_tokens) {
  return on_layout(layout, [&](auto& cache) -> result<void> {
    if (layer_count != 0)
      if (auto given = present(layers, "layers"); !given) return given;
    if (layer_count > kvcache::max_layers) return bad_argument("`layer_count` is more than 2048");
    if (cache.groups.size() >= kvcache::max_layer_groups)
      return bad_argument("the layout has 64 groups already, the most that there can be");
    cache.groups.push_back({{layers, layers + layer_count}, block_tokens});
    return {};
  });
}

troupe_status troupe_layout_set_part(troupe_layout* layout, uint32_t first_layer,
                                     uint32_t total_layers) {
  return on_layout(layout, [&](auto& cache) -> result<void> {
    cache.first_layer = first_layer;
    cache.total_layers = total_layers;
    return {};
  });
}

troupe_status troupe_layout_part(const troupe_layout* layout, uint32_t* first_layer,
                                 uint32_t* total_layers) {
  return on_layout(layout, [&](auto& cache) -> result<void> {
    if (auto out = present({{first_layer, "first_layer"}, {total_layers, "total_layers"}}); !out)
      return out;
    *first_layer = cache.first_layer;
    *total_layers = cache.total_layers;
    return {};
  });
}

troupe_status troupe_layout_group_count(const troupe_layout* layout, uint32_t* count) {
  return on_layout(layout, [&](auto& cache) -> result<void> {
    if (auto out = present(count, "count"); !out) return out;
    *count = static_cast<uint32_t>(cache.groups.size());
    return {};
  });
}

troupe_status troupe_layout_group(const troupe_layout* layout, uint32_t group, uint32_t* layers,
                                  size_t capacity, size_t* layer_count, uint32_t* block_tokens) {
  return on_layout(layout, [&](auto& cache) -> result<void> {
    if (auto out = present({{layer_count, "layer_count"}, {block_tokens, "block_tokens"}}); !out)
      return out;
    if (capacity != 0)
      if (auto out = present(layers, "layers"); !out) return out;
    const auto& groups = cache.groups;
    if (group >= groups.size()) {
      std::string why{"there is no group "};
      why.append(std::to_string(group)).append("; the layout has ");
      return fail(errc::out_of_range, why.append(std::to_string(groups.size())));
    }
    const auto& known = groups[group].layers;
    std::copy_n(known.begin(), std::min(capacity, known.size()), layers);
    *layer_count = known.size();
    *block_tokens = kvcache::block_tokens_of(cache, group);
    return {};
  });
}

troupe_status troupe_layout_region_sizes(const troupe_layout* layout, uint64_t* sizes,
                                         size_t capacity, size_t* count) {
  return on_layout(layout, [&](auto& cache) -> result<void> {
    if (auto out = present(count, "count"); !out) return out;
    if (capacity != 0)
      if (auto out = present(sizes, "sizes"); !out) return out;
    if (auto fine = kvcache::check(cache); !fine) return fine;
    const auto known = kvcache::region_sizes(cache);
    std::copy_n(known.begin(), std::min(capacity, known.size()), sizes);
    *count = known.size();
    return {};
  });
}

troupe_status troupe_layout_locate(const troupe_layout* layout, const uint32_t* given_blocks,
                                   size_t block_count, const troupe_cache_place* place,
                                   troupe_region_bytes* bytes) {
  return on_layout(layout, [&](auto& cache) -> result<void> {
    if (auto out = present({{place, "place"}, {bytes, "bytes"}}); !out) return out;
    const auto ids = blocks(given_blocks, block_count, "blocks");
    if (!ids) return fail(ids.error());
    if (auto fine = kvcache::check(cache); !fine) return fine;
    const auto found =
        kvcache::locate(cache, *ids, {place->layer, place->plane, place->token, place->head});
    if (!found) return fail(found.error());
    *bytes = {found->region, 0, found->offset, found->length};
    return {};
  });
}

troupe_status troupe_layout_encode(const troupe_layout* layout, void** bytes, size_t* byte_count) {
  return on_layout(layout, [&](auto& cache) -> result<void> {
    if (auto out = present({{bytes, "bytes"}, {byte_count, "byte_count"}}); !out) return out;
    if (auto fine = kvcache::check(cache); !fine) return fine;
    const auto encoded = kvcache::encode(cache);
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

troupe_status troupe_layout_fingerprint(const troupe_layout* layout, uint8_t* fingerprint) {
  return on_layout(layout, [&](auto& cache) -> result<void> {
    if (auto out = present(fingerprint, "fingerprint"); !out) return out;
    if (auto fine = kvcache::check(cache); !fine) return fine;
    const auto word = kvcache::fingerprint_of(cache);
    std::copy(word.begin(), word.end(), fingerprint);
    return {};
  });
}

void troupe_layout_free(troupe_layout* layout) {
  delete layout;
}
