#pragma once

/// What the engine's calls are checked against at once, on its own thread, before they become messages
/// to actors: ids and keys, the deployment's nodes, the cache, and the operations that live. And what
/// a peer says of its rank.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "troupe/actors/context/node_context.hpp"
#include "troupe/actors/engine_types.hpp"
#include "troupe/actors/messages/session_messages.hpp"
#include "troupe/actors/operations/operation_table.hpp"

namespace troupe::actors {

[[nodiscard]] result<void> check_request(const std::string& request);
[[nodiscard]] result<void> check_affinity(const std::string& affinity);
[[nodiscard]] result<void> check_key(const std::string& key);

/// `not_found` unless they are the deployment's.
[[nodiscard]] result<void> check_node(const node_context& context, const std::string& name);
[[nodiscard]] result<void> check_nodes(const node_context& context,
                                       const std::vector<std::string>& names);

/// Whether values move between this node and that one: `not_found`, or `invalid_config` where the
/// deployment has no edge that joins the two.
[[nodiscard]] result<void> check_value_edge(const node_context& context, const std::string& peer);

/// `invalid_config` where the deployment has no edge over which layers move so.
[[nodiscard]] result<void> check_edge(const node_settings& settings, const std::string& from,
                                      const std::string& to, transfer_mode mode);

/// The same of any mode.
[[nodiscard]] result<void> check_any_edge(const node_settings& settings, const std::string& from,
                                          const std::string& to);

/// The stage of a peer that asks something. Empty: the peer is of a larger deployment than this node was
/// told of. `unauthorized` where the peer's name is of a stage that is not open.
[[nodiscard]] result<std::string> stage_of_peer(const node_context& context,
                                                const std::string& peer);

/// `layout_mismatch` unless it can be the layout of the rank that the deployment makes of that node.
[[nodiscard]] result<void> check_layout_of(const node_settings& settings, const std::string& name,
                                           const kvcache::cache_layout& layout);

/// `layout_mismatch` unless the request of node `name` comes from the rank that its layout, and the
/// deployment, make of it.
[[nodiscard]] result<void> check_rank_of(const node_settings& settings,
                                         const transfer_request& request, const std::string& name,
                                         const kvcache::cache_layout& layout);

/// `stale_incarnation` unless `node`, which lives that life, is the one that is meant; 0: any.
[[nodiscard]] result<void> check_life(const std::string& node, std::uint64_t lives,
                                      std::uint64_t meant);

/// `invalid_config` where the cache has no pool of blocks.
[[nodiscard]] result<void> need_pool(const node_context& context);
/// `layout_mismatch` without a cache; `out_of_range` for what is not in it.
[[nodiscard]] result<void> check_blocks(const node_context& context,
                                        std::span<const block_id> blocks, std::uint32_t slot);
/// The blocks of a send or a receive: of the layout's groups where it has any, else of all layers together.
/// Also: `invalid_config` where they are given the other way, or not one table for each group.
[[nodiscard]] result<void> check_tables(const node_context& context,
                                        const std::vector<block_id>& blocks,
                                        const std::vector<group_blocks>& groups,
                                        std::uint32_t slot);
/// Whether so many tokens fit what the operation has room for.
[[nodiscard]] result<void> check_tokens(const operation_table::entry& entry, std::uint32_t tokens);

/// `not_found` when it ended, or is no send.
[[nodiscard]] result<operation_table::entry> find_send(const node_context& context,
                                                       operation_id id);
/// Layers that a send says are computed: `already_exists` once it is sealed.
[[nodiscard]] result<void> check_ready(const node_context& context, operation_id send,
                                       std::uint32_t layer_begin, std::uint32_t layer_end,
                                       std::uint32_t token_end);
/// Of a release or a hold.
[[nodiscard]] result<void> check_words(const node_context& context, const std::string& request,
                                       const std::vector<std::string>& sources,
                                       const std::vector<std::uint64_t>& lives);
/// All but its request's id.
[[nodiscard]] result<void> check_receive(const node_context& context, const receive_spec& spec);
/// All of its blocks but those that hold only the prefix, which other requests may share.
[[nodiscard]] std::span<const block_id> blocks_written(const receive_spec& spec,
                                                       std::uint32_t block_tokens);
/// Layers of a receive that a stream waits for. False: it is done, and they are all there. Of one that failed, its
/// own error.
[[nodiscard]] result<bool> check_awaited(const node_context& context, operation_id receive,
                                         std::uint32_t layer_begin, std::uint32_t layer_end,
                                         std::uint32_t token_end);

}  // namespace troupe::actors
