#include "troupe/kvcache/block_list.hpp"

#include <algorithm>
#include <functional>
#include <limits>

namespace troupe::kvcache {

std::vector<block_run> runs_of(std::span<const block_id> blocks) {
  std::vector<block_run> runs;
  for (const auto block : blocks) {
    const bool goes_on =
        !runs.empty() &&
        std::uint64_t{runs.back().begin.value} + runs.back().count == block.value &&
        runs.back().count < std::numeric_limits<std::uint32_t>::max();
    if (goes_on) {
      ++runs.back().count;
    } else {
      runs.push_back({block, 1});
    }
  }
  return runs;
}

std::uint64_t count_blocks(std::span<const block_run> runs) noexcept {
  std::uint64_t sum = 0;
  for (const auto& run : runs) sum += run.count;
  return sum;
}

std::vector<block_id> blocks_of(std::span<const block_run> runs) {
  std::vector<block_id> blocks;
  blocks.reserve(count_blocks(runs));
  for (const auto& run : runs) {
    for (std::uint32_t i = 0; i < run.count; ++i) blocks.push_back({run.begin.value + i});
  }
  return blocks;
}

std::optional<block_id> repeated_block(std::span<const block_id> blocks) {
  // Fast path: most lists are ascending, as a fresh pool gives blocks out.
  if (std::ranges::adjacent_find(blocks, std::greater_equal{}) == blocks.end()) return std::nullopt;
  std::vector<block_id> sorted{blocks.begin(), blocks.end()};
  std::ranges::sort(sorted);
  const auto twice = std::ranges::adjacent_find(sorted);
  if (twice == sorted.end()) return std::nullopt;
  return *twice;
}

}  // namespace troupe::kvcache
