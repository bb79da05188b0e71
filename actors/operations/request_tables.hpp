#pragma once

/// A request's blocks by group of layers: as its spec gives them, as a transfer holds them, as its messages name
/// them. Where the layout has no groups there is one table, which serves every layer.

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
  std::uint64_t first{0};  ///< number of the first one within the request
  std::vector<block_id> blocks{};
};

/// Those of a send or a receive that was checked against the layout.
[[nodiscard]] std::vector<request_table> tables_of(const kvcache::cache_layout& layout,
                                                   const std::vector<block_id>& blocks,
                                                   const std::vector<group_blocks>& groups);
/// From which token on each group of it keeps them; empty without groups.
[[nodiscard]] std::vector<std::uint64_t> kept_of(const std::vector<group_blocks>& groups);
/// The same of what a peer said.
[[nodiscard]] std::vector<std::uint64_t> kept_of(const std::vector<group_table>& groups);
/// The same of what one source gives of the request's `tokens`: of a group of which it shares no layer with
/// this rank nothing is kept, so that nothing of it is named, granted or moved.
[[nodiscard]] std::vector<std::uint64_t> kept_of(const std::vector<group_blocks>& groups,
                                                 const kvcache::transfer_geometry& geometry,
                                                 std::uint32_t tokens);
/// For plans and grants: `kept` is the destination's.
[[nodiscard]] std::vector<kvcache::block_table> as_block_tables(
    std::span<const request_table> tables, std::span<const std::uint64_t> kept);
/// Of a range, what the destination keeps of group `table`.
[[nodiscard]] kvcache::token_range kept_tokens(kvcache::token_range tokens,
                                               std::span<const std::uint64_t> kept,
                                               std::size_t table) noexcept;
/// How many of the request's first tokens all tables reach to, whatever they keep of them. A table of no layer
/// of this layout, which is then a part of a model, may be empty.
[[nodiscard]] std::uint64_t room_of(const kvcache::cache_layout& layout,
                                    std::span<const request_table> tables) noexcept;

/// A block that is named twice among tables of one pool (`kvcache::pools_of_tables`).
[[nodiscard]] std::optional<block_id> repeated_block(std::span<const std::uint32_t> pools,
                                                     std::span<const request_table> tables);

/// Whether a request names its groups as the layout has them: each once and in order, from the beginning of a
/// block on. `layout_mismatch` naming both numbers; `out_of_range`. Looks at no blocks.
[[nodiscard]] result<void> check_groups(const kvcache::cache_layout& layout,
                                        std::span<const group_table> groups);
/// How many blocks a message names, of all its tables, and how many tokens [begin, end) need.
[[nodiscard]] std::uint64_t count_named(std::span<const kvcache::block_run> blocks,
                                        std::span<const group_table> groups) noexcept;
[[nodiscard]] std::uint64_t count_needed(const kvcache::cache_layout& layout,
                                         kvcache::token_range tokens,
                                         std::span<const group_table> groups) noexcept;
/// What its lists cost while it is kept.
[[nodiscard]] std::size_t bytes_of(const transfer_request& request) noexcept;

}  // namespace troupe::actors
