#pragma once

#include <cstdint>
#include <span>

#include "troupe/kvcache/ids.hpp"
#include "troupe/kvcache/layout.hpp"
#include "troupe/kvcache/result.hpp"

namespace troupe::deploy::cli {

/// The part of one request's cache that the bench uses.
struct cache_part {
  const kvcache::cache_layout* layout{nullptr};
  std::span<const std::span<std::byte>> regions;  ///< of the layout, in its order
  std::span<const block_id> blocks;               ///< of tokens 0, 1, ...
  std::uint32_t tokens{0};
};

/// Writes bytes that identify request, layer, plane, token, head and place.
void fill_pattern(const cache_part& part, std::uint64_t request);
/// Checks that every byte is what `fill_pattern` wrote for that request. `internal` naming the
/// first place that differs.
[[nodiscard]] result<void> verify_pattern(const cache_part& part, std::uint64_t request);

}  // namespace troupe::deploy::cli
