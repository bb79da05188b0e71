#include "troupe/deploy/reference_engine/generation.hpp"

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

namespace troupe::reference {

namespace {

bool eligible(std::size_t candidate, const sampling& how) {
  if (how.printable_only) return candidate >= 0x20 && candidate < 0x7f;
  return candidate != static_cast<std::size_t>(begin_token);
}

token most_likely(std::span<const float> logits, const sampling& how) {
  std::optional<std::size_t> best;
  for (std::size_t i = 0; i < logits.size(); ++i)
    if (eligible(i, how) && (!best || logits[i] > logits[*best])) best = i;
  return static_cast<token>(best.value_or(static_cast<std::size_t>(end_token)));
}

}  // namespace

token choose_token(std::span<const float> logits, const sampling& how, std::uint32_t position) {
  const token top = most_likely(logits, how);
  if (how.temperature <= 0.0f) return top;
  const float highest = logits[static_cast<std::size_t>(top)];
  std::vector<double> weights(logits.size(), 0.0);
  double sum = 0.0;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    if (!eligible(i, how)) continue;
    weights[i] = std::exp(static_cast<double>((logits[i] - highest) / how.temperature));
    sum += weights[i];
  }
  number_source source{how.seed ^ (std::uint64_t{position} << 32)};
  double left = static_cast<double>(source.uniform()) * sum;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    if (weights[i] == 0.0) continue;
    left -= weights[i];
    if (left < 0.0) return static_cast<token>(i);
  }
  return top;
}

result<generation> prefill(const transformer& model, std::span<const token> prompt,
                           std::uint32_t first, std::uint32_t chunk, const sampling& how,
                           model_cache& cache, const chunk_callback& on_chunk_layer) {
  if (first >= prompt.size())
    return fail(errc::out_of_range, "a prompt of " + std::to_string(prompt.size()) +
                                        " tokens has nothing to compute from token " +
                                        std::to_string(first) + " on");
  const auto whole = static_cast<std::uint32_t>(prompt.size());
  const std::uint32_t step = chunk == 0 ? whole : chunk;
  std::vector<float> logits;
  for (std::uint32_t at = first; at < whole;) {
    const std::uint32_t count = std::min(step, whole - at);
    const auto tell = [&](std::uint32_t layer) -> result<void> {
      return on_chunk_layer ? on_chunk_layer(layer, at + count) : result<void>{};
    };
    auto computed = model.forward(prompt.subspan(at, count), at, cache, tell);
    if (!computed) return fail(computed.error());
    logits = std::move(*computed);
    at += count;
  }
  generation text;
  text.tokens.push_back(choose_token(logits, how, whole));
  text.logits_checksum = checksum(logits);
  return text;
}

result<generation> decode(const transformer& model, std::uint32_t prompt_tokens,
                          std::uint32_t max_tokens, generation text, const sampling& how,
                          model_cache& cache) {
  if (text.tokens.empty())
    return fail(errc::invalid_config, "decoding needs the first token, which the prefill chose");
  while (text.tokens.size() < max_tokens && text.tokens.back() != end_token) {
    const auto position = prompt_tokens + static_cast<std::uint32_t>(text.tokens.size()) - 1;
    auto logits = model.forward(std::span{text.tokens}.last(1), position, cache);
    if (!logits) return fail(logits.error());
    text.tokens.push_back(choose_token(*logits, how, position + 1));
    text.logits_checksum = checksum(*logits, text.logits_checksum);
  }
  return text;
}

result<generation> generate_alone(const transformer& model, std::span<const token> prompt,
                                  std::uint32_t max_tokens, const sampling& how,
                                  const std::string& dtype, std::uint32_t block_tokens) {
  if (block_tokens == 0) return fail(errc::invalid_config, "block_tokens must not be 0");
  const auto tokens = prompt.size() + max_tokens;
  const auto count = static_cast<std::uint32_t>((tokens + block_tokens - 1) / block_tokens);
  auto layout = kvcache::make_layout(cache_shape_of(model.config(), dtype, block_tokens, count, 1),
                                     kvcache::arrangement{});
  if (!layout) return fail(layout.error());
  auto memory = cache_memory::allocate(std::move(*layout));
  if (!memory) return fail(memory.error());
  std::vector<block_id> blocks;
  for (std::uint32_t i = 0; i < count; ++i) blocks.push_back(block_id{i});
  auto part = paged_cache::create(*memory, std::move(blocks), 0);
  if (!part) return fail(part.error());
  std::vector<paged_cache> parts;
  parts.push_back(std::move(*part));
  auto cache = model_cache::create(std::move(parts));
  if (!cache) return fail(cache.error());
  auto text = prefill(model, prompt, 0, 0, how, *cache);
  if (!text) return text;
  return decode(model, static_cast<std::uint32_t>(prompt.size()), max_tokens, std::move(*text), how,
                *cache);
}

}  // namespace troupe::reference
