#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "troupe/actors/node_context.hpp"

namespace troupe::actors {

/// Where a value of the engine's own memory lies in registered memory.
struct value_place {
  region_id region;
  std::uint64_t offset{0};
};

/// Registers the memory of a value for the time of its put, or finds it in what another put of the
/// same memory has registered. Each success is paired with one `unregister_value`. Thread-safe.
/// Errors of `endpoint::register_memory`, and `overloaded` where the memory overlaps that of
/// another put without lying in it.
[[nodiscard]] result<value_place> register_value(node_context& context,
                                                 std::span<const std::byte> value,
                                                 const std::string& key);
result<void> unregister_value(node_context& context, region_id region);

}  // namespace troupe::actors
