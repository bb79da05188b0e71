#include "troupe/kvcache/layout_fingerprint.hpp"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "troupe/kvcache/layout.hpp"

namespace troupe::kvcache {

namespace {

/// Numbers of eight bytes, least significant first; texts behind their length.
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

}  // namespace

layout_fingerprint fingerprint_of(const cache_layout& layout) {
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
    of.number(static_cast<std::uint64_t>(state.sharding));
    const bool sliced = state.sharding == state_sharding::sliced;
    of.number(state.slot_bytes * (sliced ? layout.tp_size : 1));
  }
  for (const auto byte : layout.model) of.number(std::to_integer<std::uint64_t>(byte));
  return of.end();
}

}  // namespace troupe::kvcache
