#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "troupe/actors/engine.hpp"

namespace troupe::bench {

/// The cache of an engine in GPU memory: filled, poisoned and checked by kernels there.
class gpu_cache {
 public:
  /// `node` has one region, on GPU `gpu` of this process.
  gpu_cache(const engine& node, std::uint32_t gpu);

  [[nodiscard]] std::byte* memory() const { return memory_.data(); }
  /// Offsets of a layer's data in these blocks: runs of `run_bytes` each.
  [[nodiscard]] std::vector<std::uint64_t> runs(std::uint32_t layer,
                                                std::span<const block_id> blocks) const;
  [[nodiscard]] std::uint64_t run_bytes() const;

  void fill(std::uint64_t seed) const;
  void poison() const;
  /// Ends the benchmark unless, in all layers, blocks `to` hold the pattern of blocks `from` in a
  /// peer with the same layout, and everything else is poison. Poisons them again afterwards.
  void must_hold(std::span<const block_id> from, std::span<const block_id> to, std::uint64_t seed,
                 const char* after) const;

 private:
  const kvcache::cache_layout layout_;
  const std::span<std::byte> memory_;
  const std::uint32_t gpu_;
};

}  // namespace troupe::bench
