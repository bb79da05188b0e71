#include "troupe/kvcache/touched_blocks.hpp"

#include <algorithm>
#include <optional>

#include "troupe/kvcache/byte_range.hpp"

namespace troupe::kvcache {
namespace {

/// Bytes from the first to the last of a block of `tokens` tokens.
std::uint64_t reach_of(const plane& p, std::uint64_t tokens) {
  return (tokens - 1) * p.token_stride + (p.heads - 1) * p.head_stride + p.head_bytes;
}

/// The numbers of the blocks of a plane whose bytes meet [begin, end).
std::optional<byte_range> numbers_of(const plane& p, std::uint64_t reach, std::uint64_t blocks,
                                     std::uint64_t begin, std::uint64_t end) {
  if (end <= p.base || blocks == 0) return std::nullopt;
  if (p.block_stride == 0) return byte_range{0, blocks};
  const auto first = begin < p.base + reach ? 0 : (begin - p.base - reach) / p.block_stride + 1;
  const auto last = std::min((end - 1 - p.base) / p.block_stride + 1, blocks);
  if (first >= last) return std::nullopt;
  return byte_range{first, last};
}

}  // namespace

std::vector<block_id> touched_blocks(const cache_layout& layout, const region_bytes& bytes) {
  std::vector<byte_range> numbers;
  for (std::uint32_t i = 0; i < layout.layers.size() && bytes.length > 0; ++i) {
    const auto tokens = block_tokens_of(layout, table_of(layout, i));
    for (const auto& p : layout.layers[i].planes) {
      if (p.region != bytes.region) continue;
      const auto found = numbers_of(p, reach_of(p, tokens), layout.blocks, bytes.offset,
                                    bytes.offset + bytes.length);
      if (found) numbers.push_back(*found);
    }
  }
  sort_and_join(numbers);
  std::vector<block_id> blocks;
  for (const auto& [begin, end] : numbers)
    for (auto number = begin; number < end; ++number)
      blocks.push_back(block_id{static_cast<std::uint32_t>(number)});
  return blocks;
}

}  // namespace troupe::kvcache
