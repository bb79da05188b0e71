#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "troupe/deploy/reference_engine/model_config.hpp"
#include "troupe/deploy/reference_engine/paged_cache.hpp"
#include "troupe/deploy/reference_engine/weights.hpp"
#include "troupe/kvcache/result.hpp"

namespace troupe::reference {

/// Called after each layer of a chunk, when the layer's cache is written up to the chunk's end. An
/// error stops the computation, and `forward` returns it.
using layer_callback = std::function<result<void>(std::uint32_t layer)>;

/// A small decoder-only transformer on the CPU: RMSNorm, rotary positions, grouped-query attention
/// (or a latent, or a recurrence, per layer), SwiGLU. Keys and values are read back from the cache
/// as it stores them, also those of the tokens being computed, so that the output depends on the
/// cache's bytes only. Immutable after `create`; may be used by many threads with different caches.
class transformer {
 public:
  /// Errors of `check(model_config)`.
  [[nodiscard]] static result<std::shared_ptr<const transformer>> create(model_config config);

  /// Computes `tokens` at positions [first, first + tokens.size()) over the cache of the earlier
  /// positions, writes their part of the cache layer by layer, and returns the logits (`vocabulary`
  /// values) after the last one. `out_of_range` when the cache is too small, `invalid_config` for
  /// no tokens or one outside the vocabulary, `layout_mismatch` for another model's cache.
  [[nodiscard]] result<std::vector<float>> forward(std::span<const token> tokens,
                                                   std::uint32_t first, model_cache& cache,
                                                   const layer_callback& on_layer = {}) const;

  [[nodiscard]] const model_config& config() const noexcept { return config_; }

 private:
  transformer(model_config config, model_weights weights)
      : config_{std::move(config)}, weights_{std::move(weights)} {}
  [[nodiscard]] result<void> check_call(std::span<const token> tokens, std::uint32_t first,
                                        const model_cache& cache) const;
  [[nodiscard]] std::vector<float> embed(std::span<const token> tokens) const;

  model_config config_;
  model_weights weights_;
};

}  // namespace troupe::reference
