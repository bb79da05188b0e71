#pragma once

#include <vector>

#include "troupe/kvcache/layout.hpp"

namespace troupe::kvcache {

/// The blocks that lie in these bytes of a region, whole or in part, ascending. Exact if K, V and
/// latents of a block are contiguous, as in every named arrangement; otherwise the result may
/// include a block whose pieces lie around the bytes. States are in no block. The layout must have
/// passed `check`. O(planes + found blocks).
[[nodiscard]] std::vector<block_id> touched_blocks(const cache_layout& layout,
                                                   const region_bytes& bytes);

}  // namespace troupe::kvcache
