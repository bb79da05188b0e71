#pragma once

#include <vector>

#include "troupe/actors/engine_types.hpp"
#include "troupe/actors/operations/cache_pool.hpp"

namespace troupe::actors {

/// Combines all events of an operation that is over. If a receive failed, the blocks that it was
/// given go back to `pool`, if the node has one.
[[nodiscard]] result<outcome> outcome_of(std::vector<event> events, cache_pool* pool);

}  // namespace troupe::actors
