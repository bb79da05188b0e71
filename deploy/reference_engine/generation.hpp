#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "troupe/deploy/reference_engine/transformer.hpp"

namespace troupe::reference {

/// How the next token is chosen. No state: the choice depends on the logits, the settings and the
/// position only, so that whoever continues a text needs no generator handed over.
struct sampling {
  float temperature{0.0f};  ///< 0: the most likely token
  std::uint64_t seed{1};    ///< of the draws when the temperature is above 0
  bool printable_only{
      false};  ///< only printable ASCII is chosen: weights are random, terminals are not
};

/// The token at `position` of a text.
[[nodiscard]] token choose_token(std::span<const float> logits, const sampling& how,
                                 std::uint32_t position);

/// A text as it grows: what was chosen, and a checksum over the bits of every logit on the way. Two
/// runs with equal checksums computed exactly the same numbers.
struct generation {
  std::vector<token> tokens;
  std::uint64_t logits_checksum{0};
  friend bool operator==(const generation&, const generation&) = default;
};

/// Computes the prompt from position `first` (what is before is in the cache) in chunks of at most
/// `chunk` tokens (0: at once) and chooses the first token. `on_chunk_layer(layer, end)`: that
/// layer's cache is written up to token `end`. Errors of `transformer::forward`, and of the
/// callback.
using chunk_callback = std::function<result<void>(std::uint32_t layer, std::uint32_t token_end)>;
[[nodiscard]] result<generation> prefill(const transformer& model, std::span<const token> prompt,
                                         std::uint32_t first, std::uint32_t chunk,
                                         const sampling& how, model_cache& cache,
                                         const chunk_callback& on_chunk_layer = {});

/// Continues a text whose prompt of `prompt_tokens` tokens is in the cache, until `text` has
/// `max_tokens` tokens or ends with `end_token`. The cache must hold prompt_tokens + max_tokens - 1
/// tokens.
[[nodiscard]] result<generation> decode(const transformer& model, std::uint32_t prompt_tokens,
                                        std::uint32_t max_tokens, generation text,
                                        const sampling& how, model_cache& cache);

/// Prefill and decode in one process over a cache of its own: what every transfer is compared with.
/// The cache stores `dtype` in blocks of `block_tokens`, as the real ones do.
[[nodiscard]] result<generation> generate_alone(const transformer& model,
                                                std::span<const token> prompt,
                                                std::uint32_t max_tokens, const sampling& how,
                                                const std::string& dtype,
                                                std::uint32_t block_tokens);

}  // namespace troupe::reference
