#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "troupe/kvcache/layout.hpp"
#include "troupe/kvcache/result.hpp"

namespace troupe::reference {

/// A token: a byte, or one of the special tokens after the bytes.
using token = std::int32_t;

inline constexpr token begin_token = 256;  ///< in front of every prompt
inline constexpr token end_token = 257;    ///< the model ends its text
inline constexpr std::uint32_t vocabulary = 258;

/// The tokens of a text: `begin_token` and its bytes.
[[nodiscard]] std::vector<token> encode_text(const std::string& text);
/// The bytes of the tokens; special ones are left out.
[[nodiscard]] std::string decode_text(const std::vector<token>& tokens);

/// The shape of a small decoder-only transformer. Everything that decides its output is in here:
/// two processes with equal configurations have bit-identical weights.
struct model_config {
  /// One entry per layer. Attention: grouped-query with rotary positions. mla: `head_dim` is the
  /// latent, a quarter of it carries the rotary part. recurrent: a gated linear recurrence over
  /// `hidden` channels.
  std::vector<kvcache::layer_shape> layers;
  std::uint32_t hidden{0};  ///< elements of the residual stream; a multiple of 2
  std::uint32_t heads{0};   ///< query heads; a multiple of every layer's `kv_heads`
  std::uint32_t head_dim{
      0};                ///< elements of a query head; of attention layers also of K and V; even
  std::uint32_t ffn{0};  ///< elements between the two halves of the feed-forward part
  /// Channels of a recurrence in front of the first layer, kept as the first state tensor, which a
  /// deployment's `model.state` describes and which belongs to no layer. 0: none.
  std::uint32_t input_channels{0};
  bool tied_head{false};  ///< the output head is the embedding
  std::uint64_t seed{1};  ///< of the weights

  friend bool operator==(const model_config&, const model_config&) = default;
};

/// `invalid_config` naming the field.
[[nodiscard]] result<void> check(const model_config& config);

/// `layers` equal attention layers with two query heads per KV head: the demo's model.
[[nodiscard]] model_config attention_model(std::uint32_t layers, std::uint32_t kv_heads,
                                           std::uint32_t head_dim, std::uint64_t seed);

/// The model whose cache a layout describes, so that an engine needs no second description of it.
/// `invalid_config` when this engine cannot run such a model (heads of different sizes, state
/// tensors that are not one recurrence per recurrent layer, a dtype it cannot store).
[[nodiscard]] result<model_config> model_for(const kvcache::cache_layout& layout,
                                             std::uint64_t seed);

/// The cache of this model, to be given to `kvcache::make_layout`. There is one
/// state tensor of `input_channels` fp32 values, if any, and one of `hidden` for each recurrent
/// layer.
[[nodiscard]] kvcache::cache_shape cache_shape_of(const model_config& config,
                                                  const std::string& dtype,
                                                  std::uint32_t block_tokens, std::uint32_t blocks,
                                                  std::uint32_t state_slots = 0,
                                                  std::uint32_t tp_rank = 0,
                                                  std::uint32_t tp_size = 1);

/// Rotary elements of an MLA layer: the last ones of its latent.
[[nodiscard]] constexpr std::uint32_t latent_rotary(std::uint32_t latent) noexcept {
  return latent / 4 / 2 * 2;
}

}  // namespace troupe::reference
