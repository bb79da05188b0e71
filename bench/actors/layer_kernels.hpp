#pragma once

/// Kernels that compute layers of a cache, as engines do, on a stream of their own. Read by device
/// compilers too. A driver's error ends the process.

#include <cstdint>

namespace troupe::bench {

/// One layer of one request. Every thread block does its share of `steps` and then of the bytes, so
/// no part of the layer is complete long before its kernel ends.
struct layer_work {
  void* cache{nullptr};
  const std::uint64_t* places{nullptr};  ///< of the layer's runs in the cache; memory of the GPU
  std::uint32_t count{0};                ///< of the runs
  std::uint64_t length{0};               ///< of each, a multiple of 8
  std::uint64_t seed{0};                 ///< of the pattern that they become (`xgmi_pattern.hpp`)
  std::uint32_t steps{0};                ///< of arithmetic before the bytes
};

/// Call it before using a GPU. Returns whether the GPUs are doubles, whose figures mean nothing.
bool prepare_gpus();
/// A stream of the lowest priority, like an engine's.
[[nodiscard]] void* make_compute_stream(std::uint32_t gpu);
/// A copy of the list that kernels can read; never freed.
[[nodiscard]] const std::uint64_t* on_gpu(std::uint32_t gpu, const std::uint64_t* list,
                                          std::uint64_t count);
/// Launches the next kernel of the stream.
void compute_layer(std::uint32_t gpu, void* stream, const layer_work& what);

/// A moment of a stream, by the GPU's clock.
[[nodiscard]] void* make_moment(std::uint32_t gpu);
void note_moment(std::uint32_t gpu, void* moment, void* stream);
/// The time between two noted moments; waits for both.
[[nodiscard]] double microseconds_between(std::uint32_t gpu, void* from, void* to);

}  // namespace troupe::bench
