#include "troupe/deploy/reference_engine/mixers.hpp"

#include <cmath>

namespace troupe::reference {

namespace {

/// Weighted sum of `values` (one row of `width` per cached token), weights from the query's scores
/// against `keys`. Both span the tokens up to and including the query's own.
void attend(std::span<const float> query, std::span<const float> keys,
            std::span<const float> values, std::size_t value_stride, std::uint32_t tokens,
            float scale, std::span<float> out) {
  const std::size_t key_width = query.size();
  std::vector<float> scores(tokens);
  for (std::uint32_t t = 0; t < tokens; ++t)
    scores[t] = dot(query, keys.subspan(t * key_width, key_width)) * scale;
  softmax(scores);
  for (std::uint32_t t = 0; t < tokens; ++t)
    add_scaled(out, scores[t], values.subspan(t * value_stride, out.size()));
}

float attention_scale(std::size_t width) {
  return 1.0f / std::sqrt(static_cast<float>(width));
}

}  // namespace

std::vector<float> mix_attention(const mixer_input& in, const attention_weights& w,
                                 model_cache& cache) {
  const auto& config = in.config;
  const std::uint32_t kv_heads = config.layers[in.layer].kv_heads;
  const std::size_t dim = config.head_dim;
  const std::uint32_t tokens = in.tokens();
  auto query = project(w.query, in.x);
  auto key = project(w.key, in.x);
  const auto value = project(w.value, in.x);

  for (std::uint32_t t = 0; t < tokens; ++t) {
    for (std::uint32_t h = 0; h < kv_heads; ++h) {
      const std::size_t at = (std::size_t{t} * kv_heads + h) * dim;
      const auto k = std::span{key}.subspan(at, dim);
      rotate(k, in.first + t);
      cache.write(in.layer, 0, h, in.first + t, k);
      cache.write(in.layer, 1, h, in.first + t, std::span{value}.subspan(at, dim));
    }
    for (std::uint32_t h = 0; h < config.heads; ++h)
      rotate(std::span{query}.subspan((std::size_t{t} * config.heads + h) * dim, dim),
             in.first + t);
  }

  const std::uint32_t context = in.first + tokens;
  const std::uint32_t group = config.heads / kv_heads;
  std::vector<float> keys(context * dim);
  std::vector<float> values(context * dim);
  std::vector<float> mixed(std::size_t{tokens} * config.heads * dim, 0.0f);
  for (std::uint32_t kv = 0; kv < kv_heads; ++kv) {
    cache.read(in.layer, 0, kv, context, keys);
    cache.read(in.layer, 1, kv, context, values);
    for (std::uint32_t t = 0; t < tokens; ++t)
      for (std::uint32_t h = kv * group; h < (kv + 1) * group; ++h) {
        const std::size_t at = (std::size_t{t} * config.heads + h) * dim;
        attend(std::span{query}.subspan(at, dim), keys, values, dim, in.first + t + 1,
               attention_scale(dim), std::span{mixed}.subspan(at, dim));
      }
  }
  return project(w.output, mixed);
}

namespace {

/// Writes the chunk's latents: the content normalised, the rotary part turned.
void write_latents(const mixer_input& in, const latent_weights& w, model_cache& cache) {
  const std::size_t latent = in.config.layers[in.layer].head_dim;
  const std::size_t content = w.gain.size();
  const auto compressed = project(w.compress, in.x);
  for (std::uint32_t t = 0; t < in.tokens(); ++t) {
    const auto raw = std::span{compressed}.subspan(t * latent, latent);
    auto stored = rms_norm(raw.first(content), w.gain);
    stored.insert(stored.end(), raw.begin() + static_cast<std::ptrdiff_t>(content), raw.end());
    rotate(std::span{stored}.subspan(content), in.first + t);
    cache.write(in.layer, 0, 0, in.first + t, stored);
  }
}

}  // namespace

std::vector<float> mix_latent(const mixer_input& in, const latent_weights& w, model_cache& cache) {
  const auto& config = in.config;
  const std::size_t latent = config.layers[in.layer].head_dim;
  const std::size_t content = w.gain.size();
  const std::size_t rotary = latent - content;
  const std::size_t dim = config.head_dim;
  const std::uint32_t tokens = in.tokens();
  const std::uint32_t context = in.first + tokens;
  write_latents(in, w, cache);
  std::vector<float> latents(context * latent);
  cache.read(in.layer, 0, 0, context, latents);

  auto query = project(w.query, in.x);
  std::vector<float> mixed;
  mixed.reserve(std::size_t{tokens} * config.heads * dim);
  for (std::uint32_t t = 0; t < tokens; ++t)
    for (std::uint32_t h = 0; h < config.heads; ++h) {
      const auto q = std::span{query}.subspan((std::size_t{t} * config.heads + h) * (dim + rotary),
                                              dim + rotary);
      // The key's up-projection is folded into the query: scores are taken against the latents
      // directly.
      auto folded = project(w.key_up[h], q.first(dim));
      folded.insert(folded.end(), q.begin() + static_cast<std::ptrdiff_t>(dim), q.end());
      rotate(std::span{folded}.subspan(content), in.first + t);
      std::vector<float> seen(content, 0.0f);
      attend(folded, latents, latents, latent, in.first + t + 1, attention_scale(dim + rotary),
             seen);
      const auto out = project(w.value_up[h], seen);
      mixed.insert(mixed.end(), out.begin(), out.end());
    }
  return project(w.output, mixed);
}

std::vector<float> mix_recurrent(const mixer_input& in, const recurrent_weights& w,
                                 std::size_t state_index, model_cache& cache) {
  const std::size_t channels = w.decay.rows;
  const auto decay = project(w.decay, in.x);
  const auto input = project(w.input, in.x);
  const auto gate = project(w.gate, in.x);
  // The slot may hold an earlier request's state: a new request begins with zeros.
  std::vector<float> state(channels, 0.0f);
  if (in.first > 0) cache.read_state(state_index, state);
  std::vector<float> mixed(in.tokens() * channels);
  for (std::uint32_t t = 0; t < in.tokens(); ++t)
    for (std::size_t i = 0; i < channels; ++i) {
      const std::size_t at = t * channels + i;
      const float keep = sigmoid(decay[at] + 2.0f);
      state[i] = keep * state[i] + (1.0f - keep) * input[at];
      mixed[at] = state[i] * silu(gate[at]);
    }
  cache.write_state(state_index, state);
  return project(w.output, mixed);
}

}  // namespace troupe::reference
