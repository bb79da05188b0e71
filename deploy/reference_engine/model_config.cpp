#include "troupe/deploy/reference_engine/model_config.hpp"

#include <algorithm>

#include "troupe/deploy/reference_engine/number_format.hpp"

namespace troupe::reference {

std::vector<token> encode_text(const std::string& text) {
  std::vector<token> tokens{begin_token};
  tokens.reserve(text.size() + 1);
  for (const char c : text) tokens.push_back(static_cast<unsigned char>(c));
  return tokens;
}

std::string decode_text(const std::vector<token>& tokens) {
  std::string text;
  for (const token t : tokens)
    if (t >= 0 && t < 256) text.push_back(static_cast<char>(static_cast<unsigned char>(t)));
  return text;
}

namespace {

result<void> check_layer(const model_config& config, std::size_t index) {
  const auto& layer = config.layers[index];
  const auto name = "model.layers[" + std::to_string(index) + "]";
  switch (layer.kind) {
    case kvcache::layer_kind::attention:
      if (layer.kv_heads == 0 || config.heads % layer.kv_heads != 0)
        return fail(errc::invalid_config, name + ": kv_heads " + std::to_string(layer.kv_heads) +
                                              " must divide the " + std::to_string(config.heads) +
                                              " query heads");
      if (layer.head_dim != config.head_dim)
        return fail(errc::invalid_config, name + ": head_dim " + std::to_string(layer.head_dim) +
                                              " must be the model's " +
                                              std::to_string(config.head_dim));
      return {};
    case kvcache::layer_kind::mla:
      if (latent_rotary(layer.head_dim) == 0)
        return fail(errc::invalid_config, name + ": a latent of " + std::to_string(layer.head_dim) +
                                              " elements is too small; use 8 or more");
      return {};
    case kvcache::layer_kind::recurrent: return {};
    case kvcache::layer_kind::opaque:
      return fail(errc::invalid_config, name + ": the reference engine understands all its bytes");
  }
  return fail(errc::invalid_config, name + ": unknown kind");
}

}  // namespace

result<void> check(const model_config& config) {
  if (config.layers.empty() || config.layers.size() > kvcache::max_layers)
    return fail(errc::invalid_config, "a model has 1 to " + std::to_string(kvcache::max_layers) +
                                          " layers, found " + std::to_string(config.layers.size()));
  const auto bounded = [](std::uint32_t n) { return n > 0 && n <= kvcache::max_head_dim; };
  if (!bounded(config.hidden) || !bounded(config.ffn) || !bounded(config.heads))
    return fail(errc::invalid_config, "hidden, ffn and heads of the model must be 1 to 65536");
  if (!bounded(config.head_dim) || config.head_dim % 2 != 0)
    return fail(errc::invalid_config, "head_dim must be even for rotary positions, found " +
                                          std::to_string(config.head_dim));
  if (config.input_channels > kvcache::max_head_dim)
    return fail(errc::invalid_config, "input_channels must be at most 65536");
  for (std::size_t i = 0; i < config.layers.size(); ++i)
    if (auto ok = check_layer(config, i); !ok) return ok;
  return {};
}

model_config attention_model(std::uint32_t layers, std::uint32_t kv_heads, std::uint32_t head_dim,
                             std::uint64_t seed) {
  model_config config;
  config.layers = kvcache::attention_layers(layers, kv_heads, head_dim);
  config.heads = 2 * kv_heads;
  config.head_dim = head_dim;
  config.hidden = config.heads * head_dim;
  config.ffn = 2 * config.hidden;
  config.seed = seed;
  return config;
}

namespace {

/// The state tensors must be those of the recurrences; an additional one in front is the input's.
result<void> take_states(const kvcache::cache_layout& layout, std::uint32_t recurrent,
                         model_config& config) {
  const auto count = layout.states.size();
  if (count != recurrent && count != recurrent + std::size_t{1})
    return fail(errc::invalid_config, "the layout has " + std::to_string(count) +
                                          " state tensors for " + std::to_string(recurrent) +
                                          " recurrent layers; expected one each, or one more");
  for (std::size_t i = 0; i < count; ++i) {
    const auto& state = layout.states[i];
    const bool sliced = state.sharding == kvcache::state_sharding::sliced;
    const std::uint64_t bytes = state.slot_bytes * (sliced ? layout.tp_size : 1);
    const bool of_input = count > recurrent && i == 0;
    if (of_input && bytes >= sizeof(float) && bytes % sizeof(float) == 0 &&
        bytes / sizeof(float) <= kvcache::max_head_dim)
      config.input_channels = static_cast<std::uint32_t>(bytes / sizeof(float));
    else if (of_input || bytes != std::uint64_t{config.hidden} * sizeof(float))
      return fail(errc::invalid_config,
                  "state tensor " + state.name + " has " + std::to_string(bytes) +
                      " bytes; the recurrence keeps " +
                      (of_input ? "1 to " + std::to_string(kvcache::max_head_dim)
                                : std::to_string(config.hidden)) +
                      " values of 4 bytes");
  }
  return {};
}

}  // namespace

result<model_config> model_for(const kvcache::cache_layout& layout, std::uint64_t seed) {
  model_config config;
  config.seed = seed;
  std::uint32_t recurrent = 0;
  std::uint32_t most_heads = 1;
  for (const auto& layer : layout.layers) {
    config.layers.push_back(layer.shape);
    if (layer.shape.kind == kvcache::layer_kind::attention) {
      most_heads = std::max(most_heads, layer.shape.kv_heads);
      config.head_dim = layer.shape.head_dim;
    }
    if (layer.shape.kind == kvcache::layer_kind::recurrent) ++recurrent;
  }
  config.heads = 2 * most_heads;
  if (config.head_dim == 0) config.head_dim = 16;
  config.hidden = config.heads * config.head_dim;
  config.ffn = 2 * config.hidden;
  if (!number_format_from(layout.dtype) ||
      element_bytes(*number_format_from(layout.dtype)) != layout.element_size)
    return fail(errc::invalid_config, "the reference engine stores fp32, bf16, fp16 and fp8, not " +
                                          layout.dtype + " of " +
                                          std::to_string(layout.element_size) + " bytes");
  if (auto ok = take_states(layout, recurrent, config); !ok) return fail(ok.error());
  if (auto ok = check(config); !ok) return fail(ok.error());
  return config;
}

kvcache::cache_shape cache_shape_of(const model_config& config, const std::string& dtype,
                                    std::uint32_t block_tokens, std::uint32_t blocks,
                                    std::uint32_t state_slots, std::uint32_t tp_rank,
                                    std::uint32_t tp_size) {
  kvcache::cache_shape shape;
  shape.layers = config.layers;
  shape.dtype = dtype;
  shape.block_tokens = block_tokens;
  shape.blocks = blocks;
  shape.tp_rank = tp_rank;
  shape.tp_size = tp_size;
  if (config.input_channels > 0)
    shape.states.push_back({"input.recurrence",
                            std::uint64_t{config.input_channels} * sizeof(float),
                            kvcache::state_sharding::replicated});
  for (std::size_t i = 0; i < config.layers.size(); ++i) {
    if (config.layers[i].kind != kvcache::layer_kind::recurrent) continue;
    kvcache::cache_shape::state state;
    state.name = "layer" + std::to_string(i) + ".recurrence";
    state.bytes = std::uint64_t{config.hidden} * sizeof(float);
    shape.states.push_back(state);
  }
  shape.state_slots = shape.states.empty() ? 0 : state_slots;
  return shape;
}

}  // namespace troupe::reference
