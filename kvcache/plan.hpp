#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "troupe/kvcache/block_list.hpp"
#include "troupe/kvcache/cache_map.hpp"
#include "troupe/kvcache/ids.hpp"
#include "troupe/kvcache/layout.hpp"
#include "troupe/kvcache/result.hpp"
#include "troupe/kvcache/segment.hpp"

namespace troupe::kvcache {

/// Which of the two layouts the bytes come from. The prefill side's plan of a write and the decode
/// side's plan of a read name the same bytes; only "local" and "remote" are swapped.
enum class data_flow : std::uint8_t {
  to_remote = 1,  ///< local is the source (prefill)
  to_local = 2,   ///< remote is the source
};

/// The segments between one local and one remote region (indices into each side's list of regions).
struct plan_piece {
  std::uint32_t local_region{0};
  std::uint32_t remote_region{0};
  std::vector<segment> segments;
  friend bool operator==(const plan_piece&, const plan_piece&) = default;
};

/// The segments to move, and the numbers for the transfer's log line.
struct transfer_plan {
  std::vector<plan_piece> pieces;  ///< at most one per pair of regions; none is empty
  std::uint64_t bytes{0};
  std::uint64_t segments_before{
      0};  ///< contiguous copies if each block of each plane were described alone
  std::uint64_t segments_after{0};  ///< segments in `pieces`
};

/// The prepared mapping between two ranks' caches. Made once per pair of layouts (a link's
/// handshake), then used for every transfer between them. Immutable, cheap to copy, may be used by
/// many threads.
///
/// Which source sends what. Several source ranks hold the same head when there are more ranks than
/// heads (and all hold an MLA latent or a replicated state). Of the n source ranks that hold a head
/// and the m destination ranks that want it, both in rank order, destination number i gets it from
/// source number i * n / m (integer division). Equal sizes thus pair rank by rank, and the work is
/// spread evenly. A rank that is not the designated source plans nothing for that head.
///
/// Two ranks of pipelines share the layers that both hold. Layer numbers in this class count the
/// shared layers, from 0: layer 0 is `first_local_layer()` of the local layout. Both sides thus
/// count alike, and if both hold all layers, the numbers are those of the layouts. The ranks above
/// are those of one part (layer_parts.hpp).
class transfer_geometry {
 public:
  /// `invalid_config` when either layout does not pass `check`, `layout_mismatch` when they do not
  /// map.
  [[nodiscard]] static result<transfer_geometry> create(const cache_layout& local,
                                                        const cache_layout& remote, data_flow flow);

  /// The segments that move `tokens` of `layers`; for an opaque layer, each whole block that holds
  /// a token of the range. Takes one table on each side for each group of the layout, and moves the
  /// tokens of a group that the destination's table keeps. Entries of the lists for other tokens
  /// may be anything. Segments never overlap at the destination and never leave a plane. An empty
  /// range is an empty plan. `out_of_range` for layers or tokens past the end, a list that does not
  /// hold the tokens or a block that is not in the pool; `invalid_config` when a destination block
  /// is named twice in the range (in one group, or in several that share their bytes), and for a
  /// wrong number of tables.
  [[nodiscard]] result<transfer_plan> plan(layer_range layers, token_range tokens,
                                           std::span<const block_table> local,
                                           std::span<const block_table> remote) const;
  /// For layouts in which one table serves every layer.
  [[nodiscard]] result<transfer_plan> plan(layer_range layers, token_range tokens,
                                           const block_list& local_blocks,
                                           const block_list& remote_blocks) const {
    const block_table local{local_blocks};
    const block_table remote{remote_blocks};
    return plan(layers, tokens, std::span{&local, 1}, std::span{&remote, 1});
  }

  /// The segments that move one request's state tensors (empty when the model has none, or when
  /// this rank is not the designated source). `out_of_range` for a slot that does not exist.
  [[nodiscard]] result<transfer_plan> plan_state(std::uint32_t local_slot,
                                                 std::uint32_t remote_slot) const;

  /// Maps of the shared layers and states in each side's regions: the bytes that their owner
  /// grants.
  [[nodiscard]] const cache_map& local_map() const noexcept;
  [[nodiscard]] const cache_map& remote_map() const noexcept;

  /// Whether any byte moves between these two ranks at all.
  [[nodiscard]] bool moves_anything() const noexcept;
  /// Bytes that these tokens of these layers move between these two ranks. `kept` is the first
  /// token that the destination keeps, for each group; if empty, it keeps all. O(layers).
  [[nodiscard]] std::uint64_t bytes_of(layer_range layers, token_range tokens,
                                       std::span<const std::uint64_t> kept = {}) const noexcept;
  /// How many layers both sides hold.
  [[nodiscard]] std::uint32_t layers() const noexcept;
  /// Number of the first shared layer in each layout; meaningless if there is none.
  [[nodiscard]] std::uint32_t first_local_layer() const noexcept;
  [[nodiscard]] std::uint32_t first_remote_layer() const noexcept;
  /// Whether a shared layer belongs to that table.
  [[nodiscard]] bool shares_table(std::uint32_t table) const noexcept;
  /// `pools_of_tables` of the destination.
  [[nodiscard]] std::span<const std::uint32_t> destination_pools() const noexcept;
  /// How many block tables a request has on either side.
  [[nodiscard]] std::uint32_t tables() const noexcept;
  [[nodiscard]] std::uint32_t block_tokens(std::uint32_t table = 0) const noexcept;
  [[nodiscard]] bool has_state() const noexcept;
  /// For each layer, how many tokens move together: a block's for an opaque layer, else one. Empty
  /// if no layer is opaque. A range of tokens that ends in between moves incomplete blocks.
  [[nodiscard]] const std::vector<std::uint32_t>& tokens_at_once() const noexcept;

 private:
  struct prepared;
  explicit transfer_geometry(std::shared_ptr<const prepared> state);
  std::shared_ptr<const prepared> state_;
};

/// Ranks of the prefill side that send something to `decode_rank`, ascending. `shape` gives layers
/// and states (the layout of either side; its parallel coordinates are ignored). For pipelines,
/// ranks are those of one part on each side, and the two parts must share all of these layers.
[[nodiscard]] std::vector<std::uint32_t> sources_for(const cache_layout& shape,
                                                     std::uint32_t prefill_ranks,
                                                     std::uint32_t decode_ranks,
                                                     std::uint32_t decode_rank);
/// Ranks of the decode side that `prefill_rank` sends something to, ascending. Empty for a rank
/// that is not a designated source of any.
[[nodiscard]] std::vector<std::uint32_t> targets_for(const cache_layout& shape,
                                                     std::uint32_t prefill_ranks,
                                                     std::uint32_t decode_ranks,
                                                     std::uint32_t prefill_rank);

}  // namespace troupe::kvcache
