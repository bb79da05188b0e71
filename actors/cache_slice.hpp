#pragma once

#include <cstdint>

namespace troupe::actors {

/// Layers [layer_begin, layer_end) at token positions [token_begin, token_end) of a request. In messages layers
/// are counted among those that both sides hold (`kvcache::transfer_geometry`), in an engine's events among
/// its own.
struct cache_slice {
  std::uint32_t layer_begin{0}, layer_end{0};
  std::uint32_t token_begin{0}, token_end{0};
  friend bool operator==(const cache_slice&, const cache_slice&) = default;
};

}  // namespace troupe::actors
