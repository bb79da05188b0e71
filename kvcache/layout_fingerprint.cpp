#include "troupe/kvcache/layout_fingerprint.hpp"

#include <bit>
#include <string_view>
#include <vector>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "troupe/kvcache/layout.hpp"

namespace troupe::kvcache {

namespace {

/// Numbers as eight bytes, least significant first; texts after their length.
class digest {
 public:
  void number(std::uint64_t value) {
    for (unsigned shift = 0; shift < 64U; shift += 8U) {
      bytes_.push_back(static_cast<std::uint8_t>(value >> shift));
    }
  }
  void text(std::string_view value) {
    number(value.size());
    bytes_.insert(bytes_.end(), value.begin(), value.end());
  }
  [[nodiscard]] layout_fingerprint end() const {
    XXH128_canonical_t canonical;
    XXH128_canonicalFromHash(&canonical, XXH3_128bits(bytes_.data(), bytes_.size()));
    return std::bit_cast<layout_fingerprint>(canonical);
  }

 private:
  std::vector<std::uint8_t> bytes_;
};

/// Covers what the ranks of all parts of a model have in common. Starts with a number that no
/// layout of all layers starts with, so that the two kinds are never equal.
layout_fingerprint fingerprint_of_pipeline(const cache_layout& layout) {
  digest of;
  of.number(0);
  of.text(layout.dtype);
  of.number(layout.element_size);
  of.number(layout.block_tokens);
  of.number(layout.total_layers);
  for (const auto byte : layout.model) of.number(std::to_integer<std::uint64_t>(byte));
  of.number(layout.groups.size());
  for (std::uint32_t g = 0; g < layout.groups.size(); ++g) of.number(block_tokens_of(layout, g));
  return of.end();
}

}  // namespace

layout_fingerprint fingerprint_of(const cache_layout& layout) {
  if (layout.total_layers != 0) return fingerprint_of_pipeline(layout);
  digest of;
  of.text(layout.dtype);
  of.number(layout.element_size);
  of.number(layout.block_tokens);
  of.number(layout.layers.size());
  for (const layer_layout& layer : layout.layers) {
    of.number(static_cast<std::uint64_t>(layer.shape.kind));
    of.number(layer.shape.kv_heads);
    of.number(layer.shape.head_dim);
    of.number(layer.shape.value_dim != 0 ? layer.shape.value_dim : layer.shape.head_dim);
    if (layer.shape.kind != layer_kind::opaque) {
      of.text(layer.shape.dtype.empty() ? layout.dtype : layer.shape.dtype);
      of.number(element_size_of(layout, layer.shape));
      continue;
    }
    of.text(layer.shape.packing);
    of.number(static_cast<std::uint64_t>(layer.shape.unit));
    of.number(layer.planes.size());
    for (const plane& p : layer.planes) of.number(p.head_bytes);
    of.number(layer.shape.unit == opaque_unit::block ? layout.tp_size : 0);
  }
  of.number(layout.states.size());
  for (const state_tensor& state : layout.states) {
    of.text(state.name);
    const auto parts = parts_of(state);
    if (parts.size() > 1) of.number(2 + parts.size());  // a sharding is 1 or 2
    for (const auto& part : parts) {
      of.number(static_cast<std::uint64_t>(part.sharding));
      of.number(part.bytes * (part.sharding == state_sharding::sliced ? layout.tp_size : 1));
    }
  }
  for (const auto byte : layout.model) of.number(std::to_integer<std::uint64_t>(byte));
  for (std::uint32_t g = 0; g < layout.groups.size(); ++g) {
    of.number(block_tokens_of(layout, g));
    of.number(layout.groups[g].layers.size());
    for (const auto layer : layout.groups[g].layers) of.number(layer);
  }
  return of.end();
}

}  // namespace troupe::kvcache
