#include "troupe/config/deployment.hpp"

#include <algorithm>

#include "troupe/config/words.hpp"

namespace troupe::config {
namespace {

template <typename Enum>
std::string_view word_of(Enum value) noexcept {
  for (const auto& [known, word] : words<Enum>) {
    if (known == value) return word;
  }
  return "unknown";
}

/// `product *= factor`, false when it does not fit.
bool multiply(std::uint64_t& product, std::uint64_t factor) noexcept {
  return !__builtin_mul_overflow(product, factor, &product);
}

}  // namespace

std::string_view to_string(role value) noexcept {
  return value == role::supervisor ? "supervisor" : word_of(value);
}
std::string_view to_string(placement_policy value) noexcept {
  return word_of(value);
}
std::string_view to_string(pool_full value) noexcept {
  return word_of(value);
}
std::string_view to_string(engine_kind value) noexcept {
  return value == engine_kind::none ? "none" : word_of(value);
}
std::string_view to_string(backend_kind value) noexcept {
  return word_of(value);
}
std::vector<std::string> backend_words() {
  std::vector<std::string> all;
  all.reserve(words<backend_kind>.size());
  for (const auto& [value, word] : words<backend_kind>) all.emplace_back(word);
  return all;
}
std::optional<backend_kind> backend_of(std::string_view word) noexcept {
  for (const auto& [value, known] : words<backend_kind>) {
    if (known == word) return value;
  }
  return std::nullopt;
}
std::string_view to_string(restart_policy value) noexcept {
  return word_of(value);
}
std::string_view to_string(feature_use value) noexcept {
  return word_of(value);
}
std::string_view to_string(security_mode value) noexcept {
  return word_of(value);
}
std::string_view to_string(block_order value) noexcept {
  return word_of(value);
}
std::string_view to_string(kv_placement value) noexcept {
  return word_of(value);
}
std::string_view to_string(block_inner value) noexcept {
  return word_of(value);
}

std::uint32_t dtype_size(std::string_view dtype) noexcept {
  for (const auto& known : dtypes) {
    if (known.name == dtype) return known.size;
  }
  return 0;
}

part_layers layers_of_part(std::uint32_t layers, std::uint32_t parts, std::uint32_t part) noexcept {
  const auto begin_of = [&](std::uint64_t number) {
    return static_cast<std::uint32_t>(number * layers / std::max(parts, 1U));
  };
  const auto first = begin_of(part);
  return {first, begin_of(std::uint64_t{part} + 1) - first};
}

std::uint64_t bytes_per_block(const model_config& model, std::uint32_t tensor_parallel,
                              std::uint32_t pipeline_parallel) noexcept {
  std::uint64_t elements = model.latent_dim;
  if (!model.is_mla()) {
    const std::uint32_t ranks = std::max(tensor_parallel, 1U);
    const std::uint64_t heads = (std::uint64_t{model.kv_heads} + ranks - 1) / ranks;
    elements = 2 * heads * model.head_dim;  // keys and values; both factors have 32 bits
  }
  const std::uint64_t parts = std::max(pipeline_parallel, 1U);
  const std::uint64_t layers = (model.layers + parts - 1) / parts;
  std::uint64_t bytes = elements;
  const bool fits = multiply(bytes, dtype_size(model.dtype)) &&
                    multiply(bytes, model.block_tokens) && multiply(bytes, layers);
  return fits ? bytes : 0;
}

const stage_config* find_stage(const deployment& of, std::string_view name) noexcept {
  const auto found = std::find_if(of.stages.begin(), of.stages.end(),
                                  [&](const stage_config& stage) { return stage.name == name; });
  return found == of.stages.end() ? nullptr : &*found;
}

}  // namespace troupe::config
