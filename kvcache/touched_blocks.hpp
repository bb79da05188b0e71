#pragma once

#include <vector>

#include "troupe/kvcache/layout.hpp"

namespace troupe::kvcache {

/// The blocks that lie in these bytes of a region, whole or in part, ascending. Exact where K, V and latents of a
/// block stand in one piece each, as in every arrangement that has a name; else a block whose pieces stand around
/// the bytes may be among them. States are in no block. The layout must have passed `check`. O(planes + blocks
/// that are found).
[[nodiscard]] std::vector<block_id> touched_blocks(const cache_layout& layout,
                                                   const region_bytes& bytes);

}  // namespace troupe::kvcache
