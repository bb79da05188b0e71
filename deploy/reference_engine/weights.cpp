#include "troupe/deploy/reference_engine/weights.hpp"

#include <cmath>
#include <cstddef>
#include <utility>

namespace troupe::reference {

namespace {

/// Numbers the tensors of one model; the number chooses the tensor's stream.
class tensor_maker {
 public:
  tensor_maker(std::uint64_t seed, std::uint64_t group) : seed_{seed}, group_{group} {}

  /// Uniform with variance gain^2 / columns.
  matrix make(std::uint32_t rows, std::uint32_t columns, float gain = 1.0f) {
    auto source = stream();
    const float reach = gain * std::sqrt(3.0f / static_cast<float>(columns));
    matrix m{rows, columns, std::vector<float>(std::size_t{rows} * columns)};
    for (float& v : m.values) v = (2.0f * source.uniform() - 1.0f) * reach;
    return m;
  }

  /// Norm gains near 1.
  std::vector<float> gains(std::uint32_t count) {
    auto source = stream();
    std::vector<float> values(count);
    for (float& v : values) v = 0.9f + 0.2f * source.uniform();
    return values;
  }

 private:
  number_source stream() {
    number_source mixer{seed_ ^ (group_ << 32) ^ ++tensor_};
    return number_source{mixer.next()};
  }
  std::uint64_t seed_;
  std::uint64_t group_;
  std::uint64_t tensor_{0};
};

/// Sharper than 1: uniform attention would hide a wrong cache.
constexpr float query_gain = 2.0f;

attention_weights make_attention(const model_config& c, std::uint32_t kv_heads, tensor_maker& t) {
  attention_weights w;
  w.query = t.make(c.heads * c.head_dim, c.hidden, query_gain);
  w.key = t.make(kv_heads * c.head_dim, c.hidden);
  w.value = t.make(kv_heads * c.head_dim, c.hidden);
  w.output = t.make(c.hidden, c.heads * c.head_dim);
  return w;
}

latent_weights make_latent(const model_config& c, std::uint32_t latent, tensor_maker& t) {
  const std::uint32_t rotary = latent_rotary(latent);
  const std::uint32_t content = latent - rotary;
  latent_weights w;
  w.query = t.make(c.heads * (c.head_dim + rotary), c.hidden, query_gain);
  w.compress = t.make(latent, c.hidden);
  w.gain = t.gains(content);
  for (std::uint32_t head = 0; head < c.heads; ++head) {
    w.key_up.push_back(t.make(content, c.head_dim));
    w.value_up.push_back(t.make(c.head_dim, content));
  }
  w.output = t.make(c.hidden, c.heads * c.head_dim);
  return w;
}

recurrent_weights make_recurrent(const model_config& c, std::uint32_t channels, tensor_maker& t) {
  recurrent_weights w;
  w.decay = t.make(channels, c.hidden);
  w.input = t.make(channels, c.hidden, 2.0f);
  w.gate = t.make(channels, c.hidden);
  w.output = t.make(c.hidden, channels);
  return w;
}

layer_weights make_layer(const model_config& c, std::size_t index) {
  tensor_maker t{c.seed, index + 1};
  layer_weights w;
  const auto& shape = c.layers[index];
  w.mixer_gain = t.gains(c.hidden);
  switch (shape.kind) {
    case kvcache::layer_kind::attention: w.mixer = make_attention(c, shape.kv_heads, t); break;
    case kvcache::layer_kind::mla: w.mixer = make_latent(c, shape.head_dim, t); break;
    case kvcache::layer_kind::recurrent: w.mixer = make_recurrent(c, c.hidden, t); break;
    case kvcache::layer_kind::opaque: break;  // no model here has one
  }
  w.ffn_gain = t.gains(c.hidden);
  w.ffn_gate = t.make(c.ffn, c.hidden);
  w.ffn_up = t.make(c.ffn, c.hidden);
  w.ffn_down = t.make(c.hidden, c.ffn);
  return w;
}

}  // namespace

model_weights make_weights(const model_config& config) {
  tensor_maker t{config.seed, 0};
  model_weights weights;
  // Entries of variance 1, whatever the width: the gain undoes the division by the columns.
  weights.embedding =
      t.make(vocabulary, config.hidden, std::sqrt(static_cast<float>(config.hidden)));
  weights.final_gain = t.gains(config.hidden);
  if (!config.tied_head) weights.head = t.make(vocabulary, config.hidden, 2.0f);
  if (config.input_channels > 0) {
    tensor_maker of_input{config.seed, config.layers.size() + 1};
    auto gain = of_input.gains(config.hidden);
    weights.input =
        input_weights{std::move(gain), make_recurrent(config, config.input_channels, of_input)};
  }
  for (std::size_t i = 0; i < config.layers.size(); ++i)
    weights.layers.push_back(make_layer(config, i));
  return weights;
}

}  // namespace troupe::reference
