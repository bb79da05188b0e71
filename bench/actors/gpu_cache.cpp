#include "gpu_cache.hpp"

#include <string>

#include "processes.hpp"
#include "xgmi_pattern.hpp"

namespace troupe::bench {

gpu_cache::gpu_cache(const engine& node, std::uint32_t gpu)
    : layout_{node.layout()}, memory_{need(node.region(0), "the cache")}, gpu_{gpu} {}

std::vector<std::uint64_t> gpu_cache::runs(std::uint32_t layer,
                                           std::span<const block_id> blocks) const {
  std::vector<std::uint64_t> found;
  for (const auto& plane : layout_.layers.at(layer).planes) {
    for (const auto block : blocks) {
      found.push_back(plane.base + block.value * plane.block_stride);
    }
  }
  return found;
}

std::uint64_t gpu_cache::run_bytes() const {
  return layout_.block_tokens * layout_.layers.front().planes.front().token_stride;
}

void gpu_cache::fill(std::uint64_t seed) const {
  use_gpu(gpu_);
  fill_pattern(memory_.data(), memory_.size(), 0, seed);
}

void gpu_cache::poison() const {
  use_gpu(gpu_);
  fill_poison(memory_.data(), memory_.size());
}

void gpu_cache::must_hold(std::span<const block_id> from, std::span<const block_id> to,
                          std::uint64_t seed, const char* after) const {
  std::vector<moved_range> moved;
  for (std::uint32_t layer = 0; layer < layout_.layers.size(); ++layer) {
    const auto there = runs(layer, from);
    const auto here = runs(layer, to);
    for (std::size_t i = 0; i < here.size(); ++i) {
      moved.push_back({there[i], here[i], run_bytes()});
    }
  }
  use_gpu(gpu_);
  const auto wrong = wrong_bytes(memory_.data(), moved.data(), moved.size(), seed);
  std::uint64_t first = 0;
  const auto touched = touched_bytes(memory_.data(), memory_.size(), &first);
  if (wrong == 0 && touched == 0) return;
  die(std::string{after} + ": " + std::to_string(wrong) + " bytes wrong, " +
      std::to_string(touched) + " beside touched, the first at " + std::to_string(first));
}

}  // namespace troupe::bench
