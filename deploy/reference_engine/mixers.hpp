#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "troupe/deploy/reference_engine/model_config.hpp"
#include "troupe/deploy/reference_engine/paged_cache.hpp"
#include "troupe/deploy/reference_engine/weights.hpp"

/// The token mixers of a layer, one function per kind. Each writes the chunk's part of the cache
/// and reads everything it uses back from there. `x` holds the normalised input of the chunk,
/// `hidden` values per token, `first` is the position of its first token; the result has the same
/// shape.
namespace troupe::reference {

struct mixer_input {
  const model_config& config;
  std::uint32_t layer{0};
  std::uint32_t first{0};
  std::span<const float> x;

  [[nodiscard]] std::uint32_t tokens() const noexcept {
    return static_cast<std::uint32_t>(x.size() / config.hidden);
  }
};

[[nodiscard]] std::vector<float> mix_attention(const mixer_input& in, const attention_weights& w,
                                               model_cache& cache);
[[nodiscard]] std::vector<float> mix_latent(const mixer_input& in, const latent_weights& w,
                                            model_cache& cache);
/// `state_index` is the layer's place among the cache's state tensors.
[[nodiscard]] std::vector<float> mix_recurrent(const mixer_input& in, const recurrent_weights& w,
                                               std::size_t state_index, model_cache& cache);

}  // namespace troupe::reference
