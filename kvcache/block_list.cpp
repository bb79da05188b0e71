#include "troupe/kvcache/block_list.hpp"

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

}  // namespace troupe::kvcache
