#pragma once

#include <optional>
#include <variant>
#include <vector>

#include "troupe/deploy/reference_engine/math.hpp"
#include "troupe/deploy/reference_engine/model_config.hpp"

namespace troupe::reference {

/// Grouped-query attention.
struct attention_weights {
  matrix query;   ///< heads * head_dim from hidden
  matrix key;     ///< kv_heads * head_dim from hidden
  matrix value;   ///< the same
  matrix output;  ///< hidden from heads * head_dim
};

/// Attention over a latent: what is cached is `compress`'s output, its rotary part turned by
/// position.
struct latent_weights {
  matrix query;             ///< heads * (head_dim + rotary) from hidden
  matrix compress;          ///< latent from hidden
  std::vector<float> gain;  ///< of the norm over the latent's content part
  std::vector<matrix>
      key_up;  ///< per head: content from head_dim (transposed, to fold into the query)
  std::vector<matrix> value_up;  ///< per head: head_dim from content
  matrix output;                 ///< hidden from heads * head_dim
};

/// A gated linear recurrence: s = a * s + (1 - a) * u, with a and u from the input.
struct recurrent_weights {
  matrix decay;   ///< channels from hidden
  matrix input;   ///< channels from hidden
  matrix gate;    ///< channels from hidden
  matrix output;  ///< hidden from channels
};

struct layer_weights {
  std::vector<float> mixer_gain;
  std::variant<attention_weights, latent_weights, recurrent_weights> mixer;
  std::vector<float> ffn_gain;
  matrix ffn_gate;  ///< ffn from hidden
  matrix ffn_up;    ///< ffn from hidden
  matrix ffn_down;  ///< hidden from ffn
};

/// The recurrence in front of the first layer.
struct input_weights {
  std::vector<float> gain;
  recurrent_weights mixer;
};

struct model_weights {
  matrix embedding;  ///< vocabulary rows of hidden
  std::optional<input_weights> input;
  std::vector<layer_weights> layers;
  std::vector<float> final_gain;
  matrix head;  ///< vocabulary from hidden; empty when tied to the embedding
};

/// Draws all weights from `config.seed`. The configuration must have passed `check`. Each tensor
/// has a stream of its own, so that adding a layer changes no other layer.
[[nodiscard]] model_weights make_weights(const model_config& config);

}  // namespace troupe::reference
