#pragma once

/// The expected value of every byte of one node's regions. The bytes of a request are a function of
/// its seed and of their place in the model; all others are noise that only the engine may change.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "troupe/actors/engine.hpp"
#include "troupe/kvcache/ids.hpp"
#include "troupe/kvcache/layout.hpp"

namespace troupe::engine_fuzz {

struct layer_span {
  std::uint32_t begin{0}, end{0};
};
struct token_span {
  std::uint32_t begin{0}, end{0};
};

/// The content of a request: its own seed, behind a prefix that other requests may share.
struct content {
  std::uint64_t seed{0};
  std::uint64_t shared_seed{0};
  std::uint32_t shared_tokens{0};
};

/// The blocks of a request for each group of layers, or for all layers if there are no groups.
/// Bytes before the first token of a table belong to nobody, as far as its layers go.
using block_tables = std::vector<group_blocks>;
[[nodiscard]] std::size_t count_of(const block_tables& tables);

class cache_model {
 public:
  /// Fills the regions with noise.
  cache_model(kvcache::cache_layout layout, std::vector<std::span<std::byte>> regions,
              std::uint64_t seed);

  // -- what the engine does

  /// `last`: no more tokens follow. Until then a block of a packed layer in which the tokens end is
  /// noise.
  void compute(const block_tables& blocks, layer_span layers, token_span tokens,
               const content& request, bool last);
  void compute_state(std::uint32_t slot, std::uint64_t request);
  /// Writes noise into whole blocks and a slot that no longer belong to a transfer.
  void reuse(const block_tables& blocks, std::optional<std::uint32_t> slot);

  // -- what the network did; each returns what is wrong, empty if nothing is

  /// Checks that these layers and tokens are those of the request.
  [[nodiscard]] std::string is_there(const block_tables& blocks, layer_span layers,
                                     token_span tokens, const content& request);
  [[nodiscard]] std::string state_is_there(std::uint32_t slot, std::uint64_t request);
  /// Records that a successful receive wrote all of this.
  void arrived(const block_tables& blocks, token_span tokens, std::optional<std::uint32_t> slot,
               const content& request);
  /// A failed receive may have written part of this: checks that each byte is the old one or the
  /// request's.
  [[nodiscard]] std::string torn(const block_tables& blocks, token_span tokens,
                                 std::optional<std::uint32_t> slot, const content& request);
  /// Checks every byte of every region, while no transfer is live.
  [[nodiscard]] std::string audit();

  /// The longest run of bytes of a block's first layer, to be put as a value.
  [[nodiscard]] std::span<std::byte> longest_run(block_id block) const;

  [[nodiscard]] layer_span all_layers() const {
    return {0, static_cast<std::uint32_t>(layout_.layers.size())};
  }
  [[nodiscard]] bool has_states() const { return !layout_.states.empty(); }
  [[nodiscard]] std::uint64_t compared() const { return compared_; }

 private:
  /// The table that serves a layer.
  struct table_of_layer {
    std::size_t number{0};
    std::uint32_t block_tokens{0};
  };
  /// The tokens of a range that a table keeps, for one layer.
  struct kept_tokens {
    const group_blocks& blocks;
    std::uint32_t block_tokens;
    std::uint32_t first;  ///< number of the first block
    token_span tokens;

    [[nodiscard]] bool none() const { return tokens.begin >= tokens.end; }
    [[nodiscard]] block_id block_of(std::uint32_t token) const {
      return blocks.blocks[token / block_tokens - first];
    }
  };
  [[nodiscard]] kept_tokens kept_of(const block_tables& blocks, std::uint32_t layer,
                                    token_span tokens) const;
  template <class Visit>
  void each_piece(const block_tables& blocks, layer_span layers, token_span tokens,
                  const content& request, Visit visit);
  template <class Visit>
  void each_packed(const kvcache::layer_layout& layer, std::uint64_t of_layer,
                   const kept_tokens& kept, const content& request, Visit visit);
  /// Writes noise into a block of a packed layer.
  void spoil(const kvcache::layer_layout& layer, block_id block);
  /// How many rows of heads a plane of that layer has in a block.
  [[nodiscard]] std::uint32_t rows_of_block(std::size_t layer) const {
    return is_packed(layout_.layers[layer]) ? 1 : table_of_[layer].block_tokens;
  }
  /// Whether the layer moves by whole blocks.
  [[nodiscard]] static bool is_packed(const kvcache::layer_layout& layer) {
    return layer.shape.kind == kvcache::layer_kind::opaque;
  }
  /// The first local head of a layer, of the model's.
  [[nodiscard]] std::uint32_t first_head(const kvcache::layer_layout& layer) const;
  template <class Visit>
  void each_state(std::uint32_t slot, std::uint64_t request, Visit visit);
  void noise(std::size_t region, std::uint64_t offset, std::uint64_t bytes);
  /// What of a layer lies at this place; empty if nothing does.
  [[nodiscard]] std::string place_in(std::size_t layer, std::size_t region,
                                     std::uint64_t offset) const;
  [[nodiscard]] std::string place_of(std::size_t region, std::uint64_t offset) const;

  kvcache::cache_layout layout_;
  std::vector<table_of_layer> table_of_;
  std::vector<std::span<std::byte>> regions_;
  std::vector<std::vector<std::byte>> expected_;
  std::vector<std::byte> piece_;
  std::uint64_t noise_;
  std::uint64_t compared_{0};
};

/// `size` bytes that belong to `key`.
void pattern(std::uint64_t key, std::span<std::byte> into);

}  // namespace troupe::engine_fuzz
