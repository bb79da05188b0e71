#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "troupe/deploy/reference_engine/transformer.hpp"

namespace troupe::reference {

/// How the next token is chosen. Stateless: the choice depends only on the logits, the settings and
/// the position, so another process can continue a text without a generator's state.
struct sampling {
  float temperature{0.0f};  ///< 0: the most likely token
  std::uint64_t seed{1};    ///< of the draws when the temperature is above 0
  bool printable_only{
      false};  ///< only printable ASCII is chosen: weights are random, terminals are not
};

/// The token at `position` of a text.
[[nodiscard]] token choose_token(std::span<const float> logits, const sampling& how,
                                 std::uint32_t position);

/// A growing text: the chosen tokens, and a checksum over the bits of every logit so far. Two runs
/// with equal checksums computed exactly the same numbers.
struct generation {
  std::vector<token> tokens;
  std::uint64_t logits_checksum{0};
  friend bool operator==(const generation&, const generation&) = default;
};

/// `(layer, token_end)`: that layer's cache is written up to token `token_end` (exclusive).
using chunk_callback = std::function<result<void>(std::uint32_t layer, std::uint32_t token_end)>;

/// A prompt being computed, one chunk at a time, so that an engine can do other work in between.
class chunked_prefill {
 public:
  /// From position `first` on (earlier positions are in the cache), at most `chunk` tokens at a
  /// time (0: all at once). `out_of_range` if nothing is left to compute.
  [[nodiscard]] static result<chunked_prefill> create(std::vector<token> prompt,
                                                      std::uint32_t first, std::uint32_t chunk,
                                                      const sampling& how);
  /// Computes the next chunk; not after the last one. Errors of `transformer::forward` and of the
  /// callback.
  [[nodiscard]] result<void> step(const transformer& model, model_cache& cache,
                                  const chunk_callback& on_chunk_layer);
  [[nodiscard]] bool finished() const noexcept { return at_ == prompt_.size(); }
  /// Once finished: the first token and the checksum of its logits.
  [[nodiscard]] const generation& text() const noexcept { return text_; }

 private:
  chunked_prefill() = default;
  std::vector<token> prompt_;
  std::uint32_t at_{0};
  std::uint32_t chunk_{0};
  sampling how_;
  generation text_;
};

/// Runs a `chunked_prefill` to its end.
[[nodiscard]] result<generation> prefill(const transformer& model, std::span<const token> prompt,
                                         std::uint32_t first, std::uint32_t chunk,
                                         const sampling& how, model_cache& cache,
                                         const chunk_callback& on_chunk_layer = {});

/// The first token of a prompt that is completely cached: its last token is computed again. Not for
/// a model with recurrences, whose state has moved on.
[[nodiscard]] result<generation> first_of_cached(const transformer& model,
                                                 std::span<const token> prompt, const sampling& how,
                                                 model_cache& cache);

/// Whether `text` has `max_tokens` tokens or ends with `end_token`.
[[nodiscard]] bool is_complete(const generation& text, std::uint32_t max_tokens) noexcept;
/// Adds one token to a text that has its first and whose prompt of `prompt_tokens` tokens is in the
/// cache. A text of n tokens needs a cache of prompt_tokens + n - 1.
[[nodiscard]] result<void> decode_step(const transformer& model, std::uint32_t prompt_tokens,
                                       generation& text, const sampling& how, model_cache& cache);
/// Repeats `decode_step` until the text is complete.
[[nodiscard]] result<generation> decode(const transformer& model, std::uint32_t prompt_tokens,
                                        std::uint32_t max_tokens, generation text,
                                        const sampling& how, model_cache& cache);

/// Prefill and decode in one process over a cache of its own: the reference for every transfer. The
/// cache stores `dtype` in blocks of `block_tokens`, as the real ones do.
[[nodiscard]] result<generation> generate_alone(const transformer& model,
                                                std::span<const token> prompt,
                                                std::uint32_t max_tokens, const sampling& how,
                                                const std::string& dtype,
                                                std::uint32_t block_tokens);

}  // namespace troupe::reference
