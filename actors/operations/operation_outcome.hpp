#pragma once

#include <vector>

#include "troupe/actors/engine_types.hpp"
#include "troupe/actors/operations/cache_pool.hpp"

namespace troupe::actors {

/// What all events of an operation that is over say in one. Blocks of `pool`, where the node has one,
/// that a receive was given and that failed go back to it.
[[nodiscard]] result<outcome> outcome_of(std::vector<event> events, cache_pool* pool);

}  // namespace troupe::actors
