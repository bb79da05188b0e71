#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "troupe/actors/context/node_context.hpp"

namespace troupe::actors {

/// The place of a value in registered memory.
struct value_place {
  region_id region;
  std::uint64_t offset{0};
};

/// The blocks of the node's pool that the value overlaps.
[[nodiscard]] std::vector<block_id> pool_blocks_of(const node_context& context,
                                                   std::span<const std::byte> value);

/// Reserves room for a copy of a value to put, in memory that every peer reaches. Thread-safe.
/// `pool_exhausted`: no room is left, and the copy needs a region of its own.
[[nodiscard]] result<value_store::reservation> room_for_copy(node_context& context,
                                                             std::uint64_t size);

/// Registers the memory of a value for the time of its put, or shares the registration of other
/// puts of the same memory if none of them has ended. Each success is paired with one
/// `unregister_value`. Thread-safe. Errors of `endpoint::register_memory`: `already_exists` if the
/// memory overlaps another put's memory, or a region, without lying inside it.
[[nodiscard]] result<value_place> register_value(node_context& context,
                                                 std::span<const std::byte> value,
                                                 const std::string& key);
result<void> unregister_value(node_context& context, region_id region);
/// Called when a put of unknown memory has ended: no new put shares the present registrations.
/// Thread-safe.
void close_values(node_context& context);

}  // namespace troupe::actors
