#pragma once

/// Caches in the engine's own memory, with one region per layer, in which many tokens take few
/// bytes.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cluster_fixture.hpp"
#include "seed.hpp"

namespace troupe::testing {

inline constexpr std::uint32_t block_tokens = 16;
inline constexpr std::uint32_t spare_blocks = 5;

struct prompt {
  std::string name;
  std::uint32_t layers{0}, tokens{0}, prefix{0};

  [[nodiscard]] std::uint32_t blocks() const { return (tokens + block_tokens - 1) / block_tokens; }
  [[nodiscard]] kvcache::cache_layout layout() const {
    kvcache::cache_shape shape;
    shape.layers = kvcache::attention_layers(layers, 1, 1);
    shape.dtype = "fp8";
    shape.block_tokens = block_tokens;
    shape.blocks = blocks() + spare_blocks;
    return kvcache::make_layout(
               shape, {kvcache::block_order::layers_first, kvcache::kv_placement::separate,
                       kvcache::block_inner::token_major, kvcache::region_use::per_layer})
        .value();
  }
  /// The `model` section of the deployment.
  [[nodiscard]] std::string model() const {
    return "{layers: " + std::to_string(layers) +
           ", kv_heads: 1, head_dim: 1, dtype: fp8, block_tokens: " + std::to_string(block_tokens) +
           "}";
  }
  /// All blocks but the spare ones, shuffled.
  [[nodiscard]] std::vector<block_id> shuffled(std::uint64_t salt) const {
    std::vector<block_id> all(blocks() + spare_blocks);
    for (std::uint32_t i = 0; i < all.size(); ++i) all[i].value = i;
    std::shuffle(all.begin(), all.end(), std::mt19937_64{printed_seed() + salt});
    all.resize(blocks());
    return all;
  }
};

/// A node with a cache in memory of its own, one region per layer.
class own_cache {
 public:
  own_cache(const cluster& c, const std::string& name, const prompt& what) {
    engine_options options;
    options.layout = what.layout();
    for (const auto size : kvcache::region_sizes(*options.layout)) memory_.emplace_back(size);
    for (auto& one : memory_) options.regions.emplace_back(one);
    cluster::quiet(name);
    node_ = c.start(name, std::move(options));
  }
  ~own_cache() {
    if (node_) node_->stop();
  }
  own_cache(const own_cache&) = delete;
  own_cache& operator=(const own_cache&) = delete;
  [[nodiscard]] engine* node() const { return node_.get(); }

 private:
  std::vector<std::vector<std::byte>> memory_;
  std::unique_ptr<engine> node_;
};

}  // namespace troupe::testing
