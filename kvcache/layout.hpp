#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "troupe/kvcache/block_list.hpp"
#include "troupe/kvcache/ids.hpp"
#include "troupe/kvcache/result.hpp"

namespace troupe::kvcache {

// -- logical geometry: what both sides of a transfer must agree on

/// What a layer stores per token. Numbers are part of the encoded form: append, never renumber.
enum class layer_kind : std::uint8_t {
  attention = 1,  ///< keys and values, `kv_heads` heads of `head_dim` elements each: planes K, V
  mla = 2,        ///< one latent of `head_dim` elements, no heads, same on every rank: one plane
  recurrent = 3,  ///< nothing per token (its memory is a state tensor): no plane
  opaque = 4,  ///< blocks whose bytes only the engine understands: one or two planes, moved whole
};
[[nodiscard]] std::string_view to_string(layer_kind kind) noexcept;

/// The unit in which an opaque layer is moved.
enum class opaque_unit : std::uint8_t {
  none = 0,        ///< the layer is not opaque
  block_head = 1,  ///< a head of a block: heads are spread over ranks as those of attention are
  block = 2,       ///< a block: both sides have equal parallel sizes
};

/// One layer of the model, before any sharding.
struct layer_shape {
  layer_kind kind{layer_kind::attention};
  std::uint32_t kv_heads{0};  ///< of the whole model; 0 unless `attention`, or opaque by heads
  /// Elements of one head of K (and of V), or of the latent; 0: recurrent, opaque.
  std::uint32_t head_dim{0};
  std::uint32_t value_dim{0};     ///< elements of one head of V if not as K's; 0: as `head_dim`
  std::string dtype{};            ///< of this layer alone, 1..32 bytes; empty: the layout's
  std::uint32_t element_size{0};  ///< bytes of an element of `dtype`; 0 if `dtype` is empty
  opaque_unit unit{opaque_unit::none};
  /// The engine's name for the byte format of an opaque layer, 1..32 bytes: layers of equal packing
  /// can be copied byte for byte.
  std::string packing{};

  friend bool operator==(const layer_shape&, const layer_shape&) = default;
};

/// How a state tensor is spread over the tensor-parallel ranks of a replica.
enum class state_sharding : std::uint8_t {
  replicated = 1,  ///< every rank holds all of it
  sliced = 2,      ///< rank r of T holds bytes [r * n, (r + 1) * n) of T * n
};

/// The heads that a rank holds: [begin, end) of the model's.
struct head_span {
  std::uint32_t begin{0};
  std::uint32_t end{0};

  [[nodiscard]] constexpr std::uint32_t count() const noexcept { return end - begin; }
  friend bool operator==(const head_span&, const head_span&) = default;
};

/// With H heads over T ranks, rank r holds [r*H/T, (r+1)*H/T) when T <= H, else the one head r*H/T.
/// 1 -> 4 ranks with H = 2 is heads 0, 0, 1, 1. Needs heads >= 1 and rank < ranks (else an empty
/// span).
[[nodiscard]] head_span head_range(std::uint32_t heads, std::uint32_t ranks,
                                   std::uint32_t rank) noexcept;

/// Bytes of an element of a type known by name ("fp8", "int8", "fp16", "bf16", "fp32"); 0 for
/// another name, whose size the caller must then give.
[[nodiscard]] std::uint32_t dtype_size(std::string_view name) noexcept;

// -- physical layout: where one rank keeps it, free to differ between the sides

/// Where K, V or the latent of one layer lies. The bytes of local head h of token t (0 <= t <
/// block_tokens) of block b are `[at, at + head_bytes)` of region `region`, with at = base + b *
/// block_stride + t * token_stride + h * head_stride. All in bytes. For an opaque layer they are
/// the bytes of head h for all tokens of the block, and `token_stride` is 0.
struct plane {
  std::uint32_t region{0};  ///< index into the list of regions that the engine registers
  std::uint32_t heads{1};   ///< held by this rank; 1 for a latent and for opaque blocks
  std::uint64_t base{0};
  std::uint64_t block_stride{0};
  std::uint64_t token_stride{0};
  std::uint64_t head_stride{0};
  std::uint64_t head_bytes{0};  ///< head_dim (V: value_dim) * element size, contiguous; opaque: any

  /// `at`, in bytes from the start of the region. `token` is counted within the block, `head` among
  /// the heads of this rank. Unchecked, for kernels and inner loops; `locate` checks.
  [[nodiscard]] constexpr std::uint64_t offset_of(block_id block, std::uint32_t token,
                                                  std::uint32_t head) const noexcept {
    return base + block.value * block_stride + token * token_stride + head * head_stride;
  }

  friend bool operator==(const plane&, const plane&) = default;
};

struct layer_layout {
  layer_shape shape;
  std::vector<plane> planes;  ///< attention: K, V; mla: the latent; recurrent: none; opaque: 1 or 2

  friend bool operator==(const layer_layout&, const layer_layout&) = default;
};

/// Consecutive bytes of a state's slot that are spread over ranks in one way.
struct state_part {
  std::uint64_t bytes{0};  ///< held by this rank for one request
  state_sharding sharding{state_sharding::replicated};

  friend bool operator==(const state_part&, const state_part&) = default;
};

/// A tensor of which a request has one slot, independent of its length (Mamba, sliding window,
/// sparse attention). A request uses the same slot number in every state tensor. Moved whole, with
/// the last chunk.
struct state_tensor {
  /// 1..64 bytes; matched by position and name between the sides. If a side holds only a part of
  /// the model's layers, positions differ: its states are matched by name alone, and a name must be
  /// unique in the whole model ("layers.3.conv").
  std::string name;
  state_sharding sharding{
      state_sharding::replicated};  ///< of the whole slot; ignored if there are `parts`
  std::uint32_t region{0};
  std::uint32_t slots{0};
  std::uint64_t base{0};
  std::uint64_t slot_stride{0};
  std::uint64_t slot_bytes{0};  ///< held by this rank for one request
  /// The parts of the slot, in order, if they are sliced one by one ([x, B, C] of a convolution),
  /// or some are replicated beside sliced ones. `slot_bytes` is their sum. If empty, the slot is
  /// one part with `sharding`.
  std::vector<state_part> parts{};

  friend bool operator==(const state_tensor&, const state_tensor&) = default;
};
/// The parts of a state; a single one if it lists none.
[[nodiscard]] std::vector<state_part> parts_of(const state_tensor& state);

/// Layers that have a block table of their own in a request, since they keep other tokens of it
/// than the other layers (sliding windows), or another number of tokens in a block.
///
/// Planes of different groups may share bytes, if an engine assigns each block of one pool to any
/// group: a block number then means the same bytes in every group, and a request uses a block for
/// one group only.
struct layer_group {
  /// Numbers in this layout, ascending. May be empty in a part of a model: groups are defined for
  /// the whole model, so that every rank counts them alike.
  std::vector<std::uint32_t> layers;
  std::uint32_t block_tokens{0};  ///< 0: the layout's

  friend bool operator==(const layer_group&, const layer_group&) = default;
};

/// Layers [begin, end).
struct layer_range {
  std::uint32_t begin{0};
  std::uint32_t end{0};

  [[nodiscard]] constexpr std::uint32_t count() const noexcept { return end - begin; }
  friend bool operator==(const layer_range&, const layer_range&) = default;
};

/// Limits on accepted layouts; all far above any model.
inline constexpr std::uint32_t max_layers = 2048;
inline constexpr std::uint32_t max_block_tokens = 1024;
inline constexpr std::uint32_t max_ranks = 4096;
inline constexpr std::uint32_t max_heads = 65'536;
inline constexpr std::uint32_t max_head_dim = 65'536;
inline constexpr std::uint32_t max_regions = 4096;
inline constexpr std::uint32_t max_states = 4096;
inline constexpr std::size_t max_layer_groups = 64;
inline constexpr std::size_t max_state_parts = 64;
inline constexpr std::size_t max_packing = 32;                              ///< bytes of a name
inline constexpr std::uint64_t max_opaque_bytes = std::uint64_t{1} << 40U;  ///< of one piece
inline constexpr std::uint64_t max_offset = std::uint64_t{1} << 60U;  ///< end of anything, bytes

/// How one rank's cache lies in its regions. A value; build it with `make_layout`, or fill it in by
/// hand for an arrangement without a name, then `check` it.
struct cache_layout {
  std::string dtype;              ///< 1..32 bytes, e.g. "bf16"
  std::uint32_t element_size{0};  ///< bytes of one element
  std::uint32_t block_tokens{0};  ///< 1..max_block_tokens
  std::uint32_t blocks{0};        ///< in this rank's pool; may differ between the two sides
  std::uint32_t tp_rank{0};
  std::uint32_t tp_size{1};
  std::vector<layer_layout> layers;
  std::vector<state_tensor> states;
  /// If empty, one block table serves every layer. Else each layer with planes is in exactly one
  /// group.
  std::vector<layer_group> groups{};
  /// The engine's hash of everything that decides what the bytes mean (model, revision,
  /// quantisation). Compared if both sides give it; all zero if not given.
  std::array<std::byte, 32> model{};
  /// For a rank of a pipeline: the model's number of its first layer, and the number of layers of
  /// the model. `layers` are then the model's layers [first_layer, first_layer + layers.size());
  /// `groups` and `states` cover only these, and layer numbers count from the first of them. Both 0
  /// if all layers are here.
  std::uint32_t first_layer{0};
  std::uint32_t total_layers{0};

  friend bool operator==(const cache_layout&, const cache_layout&) = default;
};

/// Bytes of one element of that layer.
[[nodiscard]] std::uint32_t element_size_of(const cache_layout& layout,
                                            const layer_shape& shape) noexcept;

/// How many block tables a request has: one for each group.
[[nodiscard]] std::uint32_t block_tables(const cache_layout& layout) noexcept;
/// The block table that serves a layer; 0 without groups. O(log layers) for each group.
[[nodiscard]] std::uint32_t table_of(const cache_layout& layout, std::uint32_t layer) noexcept;
/// Whether the layout has a layer of that table; a part of a model may have none.
[[nodiscard]] bool serves_layers(const cache_layout& layout, std::uint32_t table) noexcept;
/// Tokens in a block of that table.
[[nodiscard]] std::uint32_t block_tokens_of(const cache_layout& layout,
                                            std::uint32_t table) noexcept;

/// For each table the number of its pool: equal for two tables whose planes have bytes in common.
/// The layout must have passed `check`. For a handshake, not for the hot path.
[[nodiscard]] std::vector<std::uint32_t> pools_of_tables(const cache_layout& layout);

/// Whether the layout is valid: every number is within its limits, every layer has the planes of
/// its kind, every plane has the heads of this rank, strides nest (no byte belongs to two
/// elements), no address wraps. `invalid_config` naming the field. Does not look at regions.
/// O(layers).
[[nodiscard]] result<void> check(const cache_layout& layout);

/// `check`, and also: every byte of every plane and state lies in its region (`region_sizes[i]` is
/// the size of region i in bytes); no two planes of one group share a byte, and a state shares none
/// with anything; planes of two groups share bytes only between blocks of the same number.
/// `out_of_range` or `invalid_config`, naming layer and plane. For registration, not for the hot
/// path.
[[nodiscard]] result<void> validate(const cache_layout& layout,
                                    std::span<const std::uint64_t> region_sizes);

/// One head of K, of V or of the latent at one token of a request.
struct cache_place {
  std::uint32_t layer{0};
  std::uint32_t plane{
      0};  ///< of the layer's `planes`. attention: 0 is K, 1 is V; mla: 0, the latent
  std::uint32_t token{0};  ///< of the request, from 0
  std::uint32_t head{0};   ///< among the heads of this rank, from 0; see `head_range`
};

/// Contiguous bytes of one region of a layout.
struct region_bytes {
  std::uint32_t region{0};
  std::uint64_t offset{0};  ///< bytes from the start of the region
  std::uint64_t length{0};  ///< bytes

  friend bool operator==(const region_bytes&, const region_bytes&) = default;
};

/// Where a place lies, for a request whose token t is token t % block_tokens of block
/// `blocks[t / block_tokens]`: `head_dim` elements; for an opaque layer, the head's part of the
/// token's whole block. `blocks` is the table of the layer's group. The layout must have passed `check`.
/// `out_of_range` naming what does not exist. O(1) without groups.
[[nodiscard]] result<region_bytes> locate(const cache_layout& layout, const block_list& blocks,
                                          const cache_place& place);

/// Bytes of one block over all layers that this rank holds (its share of heads, K and V, without
/// padding); with groups, over the layers of the largest group. The layout must have passed
/// `check`.
[[nodiscard]] std::uint64_t bytes_per_block(const cache_layout& layout) noexcept;
/// Bytes of one layer's part of one block that this rank holds.
[[nodiscard]] std::uint64_t bytes_per_block(const cache_layout& layout,
                                            std::uint32_t layer) noexcept;
/// Bytes of the state of one request that this rank holds.
[[nodiscard]] std::uint64_t bytes_per_state(const cache_layout& layout) noexcept;
/// The smallest size of each region that the layout fits into; one entry per region index in use.
/// The layout must have passed `check`.
[[nodiscard]] std::vector<std::uint64_t> region_sizes(const cache_layout& layout);

/// Whether the cache of one side can be mapped onto the other. Compares layers (kind, heads, dims,
/// dtype and packing of each), dtype and its size, block tokens, groups, states, and the model if
/// both sides give it. Strides and pools may differ, and so may parallel sizes, except with layers
/// of opaque blocks. For two parts of a model, compares the layers that both hold, and the number
/// of layers of the whole model. `layout_mismatch` naming the field and both values.
[[nodiscard]] result<void> check_compatible(const cache_layout& local, const cache_layout& remote);

// -- named arrangements

/// Order of the dimensions in a region, outermost first, K and V `together` / `separate`.
enum class block_order : std::uint8_t {
  layers_first,       ///< [layer][block][kv] / [layer][kv][block]
  blocks_first,       ///< [block][kv][layer] / [kv][block][layer]
  block_interleaved,  ///< [block][layer][kv]: K and V of all layers of a block are adjacent
};
/// Whether K and V of a layer's block lie in one block or in two.
enum class kv_placement : std::uint8_t { together, separate };
/// Order inside K or V of a block: [token][head][dim] or [head][token][dim].
enum class block_inner : std::uint8_t { token_major, head_major };
enum class region_use : std::uint8_t {
  single,     ///< everything in region 0, states after the planes, 64-byte aligned
  per_layer,  ///< a region for each layer that has planes, in order, and one more for the states
              ///< if there are any; `layers_first` only
};

struct arrangement {
  block_order order{block_order::layers_first};
  kv_placement kv{kv_placement::together};
  block_inner inner{block_inner::token_major};
  region_use regions{region_use::single};
};

/// Describes the model and the rank for `make_layout`.
struct cache_shape {
  std::vector<layer_shape> layers{};
  std::string dtype{"bf16"};
  std::uint32_t element_size{0};  ///< 0: `dtype_size(dtype)`
  std::uint32_t block_tokens{16};
  std::uint32_t blocks{0};
  std::uint32_t tp_rank{0};
  std::uint32_t tp_size{1};

  struct state {
    std::string name;
    std::uint64_t bytes{0};  ///< of one request on one rank
    state_sharding sharding{state_sharding::replicated};
  };
  std::vector<state> states{};
  std::uint32_t state_slots{0};                   ///< requests that can have a state at once
  std::uint32_t first_layer{0}, total_layers{0};  ///< as of `cache_layout`
};

/// `count` equal attention layers.
[[nodiscard]] std::vector<layer_shape> attention_layers(std::uint32_t count, std::uint32_t kv_heads,
                                                        std::uint32_t head_dim);
/// `count` equal MLA layers.
[[nodiscard]] std::vector<layer_shape> mla_layers(std::uint32_t count, std::uint32_t latent_dim);

/// The layout of a named arrangement, packed without padding. `invalid_config` for a shape outside
/// its limits, for an opaque layer (whose planes only the engine knows), for `block_interleaved`
/// with separate K and V, or for regions per layer with blocks outermost.
[[nodiscard]] result<cache_layout> make_layout(const cache_shape& shape, const arrangement& how);

// -- the wire form

/// Longest encoding that `decode` accepts.
inline constexpr std::size_t max_encoded_layout = 1U << 20U;

/// A versioned byte form, the same on every machine; a regular layout takes a few bytes per layer.
[[nodiscard]] std::vector<std::byte> encode(const cache_layout& layout);
/// The reverse of `encode`. Trusts no length and allocates no more than the bytes account for; the
/// returned layout has passed `check`. `invalid_config` for anything else, `version_mismatch` for
/// another version.
[[nodiscard]] result<cache_layout> decode(std::span<const std::byte> bytes);

}  // namespace troupe::kvcache
