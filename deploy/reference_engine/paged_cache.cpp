#include "troupe/deploy/reference_engine/paged_cache.hpp"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

namespace troupe::reference {

// -- cache_memory

result<std::shared_ptr<const cache_memory>> cache_memory::create(
    kvcache::cache_layout layout, std::vector<std::span<std::byte>> regions) {
  const auto format = number_format_from(layout.dtype);
  if (!format || element_bytes(*format) != layout.element_size)
    return fail(errc::invalid_config, "cannot store elements of type " + layout.dtype + " with " +
                                          std::to_string(layout.element_size) +
                                          " bytes; use fp32, bf16, fp16 or fp8");
  std::vector<std::uint64_t> sizes;
  for (const auto& region : regions) sizes.push_back(region.size());
  if (auto ok = kvcache::validate(layout, sizes); !ok) return fail(ok.error());
  std::shared_ptr<cache_memory> memory{new cache_memory};
  memory->layout_ = std::move(layout);
  memory->regions_ = std::move(regions);
  memory->format_ = *format;
  return std::shared_ptr<const cache_memory>{std::move(memory)};
}

result<std::shared_ptr<const cache_memory>> cache_memory::allocate(kvcache::cache_layout layout) {
  if (auto ok = kvcache::check(layout); !ok) return fail(ok.error());
  std::vector<std::vector<std::byte>> owned;
  std::vector<std::span<std::byte>> regions;
  for (const std::uint64_t size : kvcache::region_sizes(layout)) owned.emplace_back(size);
  for (auto& region : owned) regions.emplace_back(region);
  auto memory = create(std::move(layout), std::move(regions));
  if (!memory) return memory;
  // Moving the vectors leaves the bytes where the regions point.
  std::const_pointer_cast<cache_memory>(*memory)->owned_ = std::move(owned);
  return memory;
}

// -- paged_cache

result<paged_cache> paged_cache::create(std::shared_ptr<const cache_memory> memory,
                                        std::vector<block_id> blocks,
                                        std::optional<std::uint32_t> state_slot) {
  const auto& layout = memory->layout();
  for (const block_id block : blocks)
    if (block.value >= layout.blocks)
      return fail(errc::out_of_range, "block " + std::to_string(block.value) +
                                          " is outside the cache of " +
                                          std::to_string(layout.blocks) + " blocks");
  for (const auto& state : layout.states)
    if (!state_slot || *state_slot >= state.slots)
      return fail(errc::out_of_range, "state tensor " + state.name + " needs a slot below " +
                                          std::to_string(state.slots) + ", found " +
                                          (state_slot ? std::to_string(*state_slot) : "none"));
  paged_cache cache;
  cache.memory_ = std::move(memory);
  cache.blocks_ = std::move(blocks);
  cache.state_slot_ = state_slot.value_or(0);
  return cache;
}

std::uint32_t paged_cache::capacity() const noexcept {
  return static_cast<std::uint32_t>(blocks_.size()) * layout().block_tokens;
}

kvcache::head_span paged_cache::heads(std::uint32_t layer) const noexcept {
  const auto& shape = layout().layers[layer].shape;
  switch (shape.kind) {
    case kvcache::layer_kind::attention:
      return kvcache::head_range(shape.kv_heads, layout().tp_size, layout().tp_rank);
    case kvcache::layer_kind::mla: return {0, 1};
    case kvcache::layer_kind::recurrent:
    case kvcache::layer_kind::opaque: return {0, 0};
  }
  return {0, 0};
}

std::byte* paged_cache::at(const kvcache::plane& plane, std::uint32_t local_head,
                           std::uint32_t token) const noexcept {
  const std::uint32_t block_tokens = layout().block_tokens;
  const auto offset =
      plane.offset_of(blocks_[token / block_tokens], token % block_tokens, local_head);
  return memory_->region(plane.region).data() + offset;
}

void paged_cache::write(std::uint32_t layer, std::uint32_t plane, std::uint32_t head,
                        std::uint32_t token, std::span<const float> values) {
  const auto& where = layout().layers[layer].planes[plane];
  store_numbers(memory_->format(), values, at(where, head - heads(layer).begin, token));
}

void paged_cache::read(std::uint32_t layer, std::uint32_t plane, std::uint32_t head,
                       std::uint32_t tokens, std::span<float> values) const {
  const auto& where = layout().layers[layer].planes[plane];
  const std::size_t width = layout().layers[layer].shape.head_dim;
  const std::uint32_t local_head = head - heads(layer).begin;
  for (std::uint32_t token = 0; token < tokens; ++token)
    load_numbers(memory_->format(), at(where, local_head, token),
                 values.subspan(token * width, width));
}

paged_cache::state_part paged_cache::state(std::size_t index) const {
  const auto& tensor = layout().states[index];
  const std::uint64_t offset = tensor.base + state_slot_ * tensor.slot_stride;
  const std::uint64_t first =
      tensor.sharding == kvcache::state_sharding::sliced ? layout().tp_rank * tensor.slot_bytes : 0;
  return {first, memory_->region(tensor.region).subspan(offset, tensor.slot_bytes)};
}

namespace {

/// Calls `visit` with every run of bytes that a rank holds of the tokens, in canonical order.
template <class At, class Visit>
void for_each_run(const kvcache::cache_layout& layout, std::uint32_t tokens, At at, Visit visit) {
  for (const auto& layer : layout.layers)
    for (const auto& plane : layer.planes)
      for (std::uint32_t token = 0; token < tokens; ++token)
        for (std::uint32_t head = 0; head < plane.heads; ++head)
          visit(std::span<std::byte>{at(plane, head, token), plane.head_bytes});
}

}  // namespace

std::vector<std::byte> paged_cache::export_tokens(std::uint32_t tokens) const {
  std::vector<std::byte> bytes;
  const auto append = [&](std::span<const std::byte> run) {
    bytes.insert(bytes.end(), run.begin(), run.end());
  };
  for_each_run(
      layout(), tokens,
      [&](const auto& plane, auto head, auto token) { return at(plane, head, token); }, append);
  for (std::size_t i = 0; i < layout().states.size(); ++i) append(state(i).bytes);
  return bytes;
}

result<void> paged_cache::import_tokens(std::uint32_t tokens, std::span<const std::byte> bytes) {
  const std::uint64_t per_token = kvcache::bytes_per_block(layout()) / layout().block_tokens;
  const std::uint64_t wanted = per_token * tokens + kvcache::bytes_per_state(layout());
  if (tokens > capacity() || bytes.size() != wanted)
    return fail(errc::layout_mismatch, "a rank's part of " + std::to_string(tokens) +
                                           " tokens has " + std::to_string(wanted) +
                                           " bytes, found " + std::to_string(bytes.size()));
  std::size_t from = 0;
  const auto take = [&](std::span<std::byte> run) {
    std::memcpy(run.data(), bytes.data() + from, run.size());
    from += run.size();
  };
  for_each_run(
      layout(), tokens,
      [&](const auto& plane, auto head, auto token) { return at(plane, head, token); }, take);
  for (std::size_t i = 0; i < layout().states.size(); ++i) take(state(i).bytes);
  return {};
}

// -- model_cache

namespace {

bool holds(const paged_cache& part, std::uint32_t layer, std::uint32_t head) {
  const auto span = part.heads(layer);
  return span.begin <= head && head < span.end;
}

std::uint32_t heads_of(const kvcache::layer_shape& shape) {
  switch (shape.kind) {
    case kvcache::layer_kind::attention: return shape.kv_heads;
    case kvcache::layer_kind::mla: return 1;
    case kvcache::layer_kind::recurrent:
    case kvcache::layer_kind::opaque: return 0;
  }
  return 0;
}

result<void> check_heads(const std::vector<paged_cache>& parts) {
  const auto& layers = parts.front().layout().layers;
  for (std::uint32_t layer = 0; layer < layers.size(); ++layer)
    for (std::uint32_t head = 0; head < heads_of(layers[layer].shape); ++head)
      if (std::none_of(parts.begin(), parts.end(),
                       [&](const paged_cache& part) { return holds(part, layer, head); }))
        return fail(errc::layout_mismatch,
                    "no part of the cache holds head " + std::to_string(head) + " of layer " +
                        std::to_string(layer) + "; gather the caches of all ranks");
  return {};
}

result<void> check_states(const std::vector<paged_cache>& parts) {
  const auto& layout = parts.front().layout();
  for (std::size_t i = 0; i < layout.states.size(); ++i) {
    const bool sliced = layout.states[i].sharding == kvcache::state_sharding::sliced;
    const std::uint64_t whole = layout.states[i].slot_bytes * (sliced ? layout.tp_size : 1);
    std::uint64_t known = 0;
    for (bool grew = true; grew && known < whole;) {
      grew = false;
      for (const auto& part : parts) {
        const auto piece = part.state(i);
        if (piece.first <= known && piece.first + piece.bytes.size() > known) {
          known = piece.first + piece.bytes.size();
          grew = true;
        }
      }
    }
    if (known < whole)
      return fail(errc::layout_mismatch, "byte " + std::to_string(known) + " of state tensor " +
                                             layout.states[i].name +
                                             " is in no part of the cache; gather all ranks");
  }
  return {};
}

}  // namespace

result<model_cache> model_cache::create(std::vector<paged_cache> parts) {
  if (parts.empty()) return fail(errc::invalid_config, "a cache needs at least one rank's part");
  for (const auto& part : parts)
    if (auto ok = kvcache::check_compatible(parts.front().layout(), part.layout()); !ok)
      return fail(ok.error());
  if (auto ok = check_heads(parts); !ok) return fail(ok.error());
  if (auto ok = check_states(parts); !ok) return fail(ok.error());
  return model_cache{std::move(parts)};
}

std::uint32_t model_cache::capacity() const noexcept {
  std::uint32_t least = parts_.front().capacity();
  for (const auto& part : parts_) least = std::min(least, part.capacity());
  return least;
}

void model_cache::write(std::uint32_t layer, std::uint32_t plane, std::uint32_t head,
                        std::uint32_t token, std::span<const float> values) {
  for (auto& part : parts_)
    if (holds(part, layer, head)) part.write(layer, plane, head, token, values);
}

void model_cache::read(std::uint32_t layer, std::uint32_t plane, std::uint32_t head,
                       std::uint32_t tokens, std::span<float> values) const {
  for (const auto& part : parts_)
    if (holds(part, layer, head)) return part.read(layer, plane, head, tokens, values);
}

void model_cache::write_state(std::size_t index, std::span<const float> values) {
  const auto whole = std::as_bytes(values);
  for (auto& part : parts_) {
    const auto piece = part.state(index);
    std::memcpy(piece.bytes.data(), whole.data() + piece.first, piece.bytes.size());
  }
}

void model_cache::read_state(std::size_t index, std::span<float> values) const {
  const auto whole = std::as_writable_bytes(values);
  for (auto part = parts_.rbegin(); part != parts_.rend(); ++part) {
    const auto piece = part->state(index);
    std::memcpy(whole.data() + piece.first, piece.bytes.data(), piece.bytes.size());
  }
}

}  // namespace troupe::reference
