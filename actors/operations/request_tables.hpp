#pragma once

/// A request's blocks by group of layers: as given in its spec, held by a transfer, and named in
/// its messages. A layout without groups has one table, which serves every layer.

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "troupe/actors/engine_types.hpp"
#include "troupe/actors/messages/session_messages.hpp"
#include "troupe/kvcache/block_list.hpp"
#include "troupe/kvcache/layout.hpp"
#include "troupe/kvcache/plan.hpp"
#include "troupe/kvcache/result.hpp"

namespace troupe::actors {

/// The blocks of one group.
struct request_table {
  std::uint64_t first{0};  ///< number of the first block within the request
  std::vector<block_id> blocks{};
};

/// The tables of a send or a receive that was checked against the layout.
[[nodiscard]] std::vector<request_table> tables_of(const kvcache::cache_layout& layout,
                                                   const std::vector<block_id>& blocks,
                                                   const std::vector<group_blocks>& groups);
/// The token from which each group keeps its tokens; empty without groups.
[[nodiscard]] std::vector<std::uint64_t> kept_of(const std::vector<group_blocks>& groups);
/// Same, for what a peer sent.
[[nodiscard]] std::vector<std::uint64_t> kept_of(const std::vector<group_table>& groups);
/// Same, for what one source gives of the request's `tokens`: a group of which the source shares no
/// layer with this rank keeps nothing, so that nothing of it is named, granted or moved.
[[nodiscard]] std::vector<std::uint64_t> kept_of(const std::vector<group_blocks>& groups,
                                                 const kvcache::transfer_geometry& geometry,
                                                 std::uint32_t tokens);
/// For plans and grants; `kept` is the destination's.
[[nodiscard]] std::vector<kvcache::block_table> as_block_tables(
    std::span<const request_table> tables, std::span<const std::uint64_t> kept);
/// The part of a range that the destination keeps of group `table`.
[[nodiscard]] kvcache::token_range kept_tokens(kvcache::token_range tokens,
                                               std::span<const std::uint64_t> kept,
                                               std::size_t table) noexcept;
/// How many of the request's first tokens all tables reach to, whatever they keep of them. In a
/// layout that is a part of a model, a table without layers may be empty.
[[nodiscard]] std::uint64_t room_of(const kvcache::cache_layout& layout,
                                    std::span<const request_table> tables) noexcept;

/// A block that is named twice in tables of one pool (`kvcache::pools_of_tables`). Empty if there
/// is none.
[[nodiscard]] std::optional<block_id> repeated_block(std::span<const std::uint32_t> pools,
                                                     std::span<const request_table> tables);

/// Checks that a request names its groups as the layout has them: each once and in order, beginning
/// with the first token of a block. `layout_mismatch` naming both numbers; `out_of_range`. Looks at
/// no blocks.
[[nodiscard]] result<void> check_groups(const kvcache::cache_layout& layout,
                                        std::span<const group_table> groups);
/// The number of blocks that a message names in all its tables, and the number that `tokens` need.
[[nodiscard]] std::uint64_t count_named(std::span<const kvcache::block_run> blocks,
                                        std::span<const group_table> groups) noexcept;
[[nodiscard]] std::uint64_t count_needed(const kvcache::cache_layout& layout,
                                         kvcache::token_range tokens,
                                         std::span<const group_table> groups) noexcept;
/// Memory that the request's lists take while it is kept.
[[nodiscard]] std::size_t bytes_of(const transfer_request& request) noexcept;

}  // namespace troupe::actors
