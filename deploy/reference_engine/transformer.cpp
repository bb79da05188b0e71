#include "troupe/deploy/reference_engine/transformer.hpp"

#include <algorithm>
#include <string>
#include <variant>

#include "troupe/deploy/reference_engine/mixers.hpp"

namespace troupe::reference {

result<std::shared_ptr<const transformer>> transformer::create(model_config config) {
  if (auto ok = check(config); !ok) return fail(ok.error());
  auto weights = make_weights(config);
  return std::shared_ptr<const transformer>{new transformer{std::move(config), std::move(weights)}};
}

result<void> transformer::check_call(std::span<const token> tokens, std::uint32_t first,
                                     const model_cache& cache) const {
  if (tokens.empty()) return fail(errc::invalid_config, "there are no tokens to compute");
  for (const token t : tokens)
    if (t < 0 || t >= static_cast<token>(vocabulary))
      return fail(errc::invalid_config, "token " + std::to_string(t) +
                                            " is outside the vocabulary of " +
                                            std::to_string(vocabulary));
  if (first > cache.capacity() || tokens.size() > cache.capacity() - first)
    return fail(errc::out_of_range, "tokens " + std::to_string(first) + " to " +
                                        std::to_string(first + tokens.size()) + " do not fit the " +
                                        std::to_string(cache.capacity()) +
                                        " tokens of the request's blocks");
  const auto& layout = cache.parts().front().layout();
  const auto same = [](const kvcache::layer_layout& held, const kvcache::layer_shape& wanted) {
    return held.shape == wanted;
  };
  if (!std::equal(layout.layers.begin(), layout.layers.end(), config_.layers.begin(),
                  config_.layers.end(), same))
    return fail(errc::layout_mismatch, "the cache was laid out for another model");
  return {};
}

std::vector<float> transformer::embed(std::span<const token> tokens) const {
  std::vector<float> x;
  x.reserve(tokens.size() * config_.hidden);
  for (const token t : tokens) {
    const auto row = weights_.embedding.row(static_cast<std::uint32_t>(t));
    x.insert(x.end(), row.begin(), row.end());
  }
  return x;
}

namespace {

struct mix {
  const mixer_input& in;
  std::size_t state_index;
  model_cache& cache;

  std::vector<float> operator()(const attention_weights& w) const {
    return mix_attention(in, w, cache);
  }
  std::vector<float> operator()(const latent_weights& w) const { return mix_latent(in, w, cache); }
  std::vector<float> operator()(const recurrent_weights& w) const {
    return mix_recurrent(in, w, state_index, cache);
  }
};

std::vector<float> feed_forward(const layer_weights& w, std::span<const float> x) {
  const auto normal = rms_norm(x, w.ffn_gain);
  auto inner = project(w.ffn_gate, normal);
  const auto up = project(w.ffn_up, normal);
  for (std::size_t i = 0; i < inner.size(); ++i) inner[i] = silu(inner[i]) * up[i];
  return project(w.ffn_down, inner);
}

}  // namespace

result<std::vector<float>> transformer::forward(std::span<const token> tokens, std::uint32_t first,
                                                model_cache& cache,
                                                const layer_callback& on_layer) const {
  if (auto ok = check_call(tokens, first, cache); !ok) return fail(ok.error());
  auto x = embed(tokens);
  std::size_t states = 0;
  if (weights_.input) {
    const auto normal = rms_norm(x, weights_.input->gain);
    const mixer_input in{config_, 0, first, normal};
    add_scaled(x, 1.0f, mix_recurrent(in, weights_.input->mixer, states++, cache));
  }
  for (std::uint32_t layer = 0; layer < config_.layers.size(); ++layer) {
    const auto& w = weights_.layers[layer];
    const auto normal = rms_norm(x, w.mixer_gain);
    const mixer_input in{config_, layer, first, normal};
    add_scaled(x, 1.0f, std::visit(mix{in, states, cache}, w.mixer));
    if (config_.layers[layer].kind == kvcache::layer_kind::recurrent) ++states;
    // The layer's cache is written: its transfer may start while the rest is computed.
    if (on_layer)
      if (auto ok = on_layer(layer); !ok) return fail(ok.error());
    add_scaled(x, 1.0f, feed_forward(w, x));
  }
  const auto last = std::span<const float>{x}.last(config_.hidden);
  const auto normal = rms_norm(last, weights_.final_gain);
  return project(config_.tied_head ? weights_.embedding : weights_.head, normal);
}

}  // namespace troupe::reference
