#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "troupe/kvcache/block_list.hpp"
#include "troupe/kvcache/byte_set.hpp"
#include "troupe/kvcache/layout.hpp"
#include "troupe/kvcache/result.hpp"

namespace troupe::kvcache {

/// The part of a layout that a map covers: layers and states by their numbers in the layout.
struct mapped_share {
  layer_range layers;
  std::vector<std::uint32_t> states;
};

/// Where the tokens of requests lie in the regions of one rank's cache. Made once per layout, or
/// once for the share of it that two ranks have in common. Immutable, cheap to copy, may be used by
/// many threads.
class cache_map {
 public:
  /// `invalid_config` when the layout does not pass `check`, when one of its blocks has more than
  /// 1,048,576 pieces, or when planes of more than 256 strides are interleaved.
  [[nodiscard]] static result<cache_map> create(const cache_layout& layout);
  /// A map of these layers and states alone, over the regions of the whole layout: it reports no
  /// byte of other layers or states. `out_of_range` for a layer or state that the layout does not
  /// have.
  [[nodiscard]] static result<cache_map> create(const cache_layout& layout,
                                                const mapped_share& share);

  /// The bytes of these tokens in every layer of the map (all heads that this rank holds; for an
  /// opaque layer, all of each block that a token touches) and, when given, of one state slot: one
  /// entry per region of the layout, in order. The owner grants these bytes for a transfer, and
  /// both sides derive them from the blocks that a request names. Takes 12 bytes per block, for any
  /// number of layers, and 48 bytes for each piece of a block that is not whole. Blocks may be
  /// named twice; entries for other tokens may be anything. `out_of_range` for a list that does not
  /// hold the tokens and for a block or slot that does not exist, `invalid_config` if there is not
  /// one table per group of the layout.
  [[nodiscard]] result<std::vector<byte_set>> bytes_of(
      token_range tokens, std::span<const block_table> tables,
      std::optional<std::uint32_t> state_slot = std::nullopt) const;
  /// For layouts in which one table serves every layer.
  [[nodiscard]] result<std::vector<byte_set>> bytes_of(
      token_range tokens, const block_list& blocks,
      std::optional<std::uint32_t> state_slot = std::nullopt) const {
    const block_table only{blocks};
    return bytes_of(tokens, std::span{&only, 1}, state_slot);
  }

 private:
  struct prepared;
  explicit cache_map(std::shared_ptr<const prepared> state);
  std::shared_ptr<const prepared> state_;
};

}  // namespace troupe::kvcache
