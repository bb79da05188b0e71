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

result<chunked_prefill> chunked_prefill::create(std::vector<token> prompt, std::uint32_t first,
                                                std::uint32_t chunk, const sampling& how) {
  if (first >= prompt.size())
    return fail(errc::out_of_range, "a prompt of " + std::to_string(prompt.size()) +
                                        " tokens has nothing to compute from token " +
                                        std::to_string(first) + " on");
  chunked_prefill run;
  run.chunk_ = chunk == 0 ? static_cast<std::uint32_t>(prompt.size()) : chunk;
  run.prompt_ = std::move(prompt);
  run.at_ = first;
  run.how_ = how;
  return run;
}

result<void> chunked_prefill::step(const transformer& model, model_cache& cache,
                                   const chunk_callback& on_chunk_layer) {
  const auto whole = static_cast<std::uint32_t>(prompt_.size());
  const std::uint32_t end = at_ + std::min(chunk_, whole - at_);
  const auto tell = [&](std::uint32_t layer) -> result<void> {
    return on_chunk_layer ? on_chunk_layer(layer, end) : result<void>{};
  };
  const auto chunk = std::span<const token>{prompt_}.subspan(at_, end - at_);
  const auto logits = model.forward(chunk, at_, cache, tell);
  if (!logits) return fail(logits.error());
  at_ = end;
  if (finished()) {
    text_.tokens = {choose_token(*logits, how_, whole)};
    text_.logits_checksum = checksum(*logits);
  }
  return {};
}

result<generation> prefill(const transformer& model, std::span<const token> prompt,
                           std::uint32_t first, std::uint32_t chunk, const sampling& how,
                           model_cache& cache, const chunk_callback& on_chunk_layer) {
  auto run = chunked_prefill::create({prompt.begin(), prompt.end()}, first, chunk, how);
  if (!run) return fail(run.error());
  while (!run->finished())
    if (auto ok = run->step(model, cache, on_chunk_layer); !ok) return fail(ok.error());
  return run->text();
}

result<generation> first_of_cached(const transformer& model, std::span<const token> prompt,
                                   const sampling& how, model_cache& cache) {
  return prefill(model, prompt, static_cast<std::uint32_t>(prompt.size()) - 1, 0, how, cache);
}

bool is_complete(const generation& text, std::uint32_t max_tokens) noexcept {
  return text.tokens.size() >= max_tokens ||
         (!text.tokens.empty() && text.tokens.back() == end_token);
}

result<void> decode_step(const transformer& model, std::uint32_t prompt_tokens, generation& text,
                         const sampling& how, model_cache& cache) {
  if (text.tokens.empty())
    return fail(errc::invalid_config, "decoding needs the first token, which the prefill chose");
  const auto position = prompt_tokens + static_cast<std::uint32_t>(text.tokens.size()) - 1;
  const auto logits = model.forward(std::span{text.tokens}.last(1), position, cache);
  if (!logits) return fail(logits.error());
  text.tokens.push_back(choose_token(*logits, how, position + 1));
  text.logits_checksum = checksum(*logits, text.logits_checksum);
  return {};
}

result<generation> decode(const transformer& model, std::uint32_t prompt_tokens,
                          std::uint32_t max_tokens, generation text, const sampling& how,
                          model_cache& cache) {
  while (!is_complete(text, max_tokens))
    if (auto ok = decode_step(model, prompt_tokens, text, how, cache); !ok) return fail(ok.error());
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
