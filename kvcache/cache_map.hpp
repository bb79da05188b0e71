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

/// What of a layout a map is of: layers and states by their numbers in it.
struct mapped_share {
  layer_range layers;
  std::vector<std::uint32_t> states;
};

/// Where the tokens of requests lie in the regions of one rank's cache. Made once per layout, or once for
/// what two ranks share of it. Immutable, cheap to copy, may be used by many threads.
class cache_map {
 public:
  /// `invalid_config` when the layout does not pass `check`, when a block of it is in more than
  /// 1,048,576 pieces, or when planes of more than 256 strides are interleaved.
  [[nodiscard]] static result<cache_map> create(const cache_layout& layout);
  /// The same of these layers and states alone: no byte of others is in what it says. It has the regions of
  /// the whole layout. `out_of_range` for a layer or state that is not there.
  [[nodiscard]] static result<cache_map> create(const cache_layout& layout,
                                                const mapped_share& share);

  /// The bytes of these tokens in every layer of the map (all heads that this rank holds; of an opaque layer all of the
  /// blocks that any of them is in) and, when given, of one state slot: one entry per region of the layout, in order. It is what the owner grants for a
  /// transfer, and both sides derive it from the blocks that a request names. Takes 12 bytes per block,
  /// whatever the number of layers, and for a block that is not whole 48 for each piece of it. Blocks
  /// may be named twice, entries for other tokens may be anything. `out_of_range` for a list that does not hold the tokens and for a block or slot that is
  /// not there, `invalid_config` for another number of tables than the layout has groups.
  [[nodiscard]] result<std::vector<byte_set>> bytes_of(
      token_range tokens, std::span<const block_table> tables,
      std::optional<std::uint32_t> state_slot = std::nullopt) const;
  /// Where one table serves every layer.
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
