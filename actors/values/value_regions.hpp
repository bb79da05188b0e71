#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "troupe/actors/context/node_context.hpp"

namespace troupe::actors {

/// Where a value of the engine's own memory lies in registered memory.
struct value_place {
  region_id region;
  std::uint64_t offset{0};
};

/// The blocks of the node's pool that the value lies in, whole or in part.
[[nodiscard]] std::vector<block_id> pool_blocks_of(const node_context& context,
                                                   std::span<const std::byte> value);

/// Room for a copy of a value that is to be put, in memory that every peer reaches. Thread-safe.
/// `pool_exhausted`: so much of it is in use that the copy needs a region of its own.
[[nodiscard]] result<value_store::reservation> room_for_copy(node_context& context,
                                                             std::uint64_t size);

/// Registers the memory of a value for the time of its put, or finds it in what other puts of the
/// same memory have registered, none of which has ended. Each success is paired with one
/// `unregister_value`. Thread-safe. Errors of `endpoint::register_memory`: `already_exists` where the
/// memory overlaps that of another put, or a region, without lying in it.
[[nodiscard]] result<value_place> register_value(node_context& context,
                                                 std::span<const std::byte> value,
                                                 const std::string& key);
result<void> unregister_value(node_context& context, region_id region);
/// A put has ended, nobody knows of which memory: no other shares what is registered now. Thread-safe.
void close_values(node_context& context);

}  // namespace troupe::actors
