#pragma once

/// Checks of the engine's calls, run on its own thread before a call becomes a message to an actor:
/// ids and keys, the deployment's nodes, the cache, and the live operations. Also checks of what a
/// peer says about its rank.

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

/// `not_found` unless the deployment has these nodes.
[[nodiscard]] result<void> check_node(const node_context& context, const std::string& name);
[[nodiscard]] result<void> check_nodes(const node_context& context,
                                       const std::vector<std::string>& names);

/// Whether values move between this node and `peer`: `not_found`, or `invalid_config` if no edge of
/// the deployment joins the two.
[[nodiscard]] result<void> check_value_edge(const node_context& context, const std::string& peer);

/// `invalid_config` unless the deployment has an edge over which layers move in that mode.
[[nodiscard]] result<void> check_edge(const node_settings& settings, const std::string& from,
                                      const std::string& to, transfer_mode mode);

/// Same, for any mode.
[[nodiscard]] result<void> check_any_edge(const node_settings& settings, const std::string& from,
                                          const std::string& to);

/// The stage of a peer that sends a request. Empty if the peer is of a larger deployment than the
/// one this node knows. `unauthorized` if the peer's name is of a stage that is not open.
[[nodiscard]] result<std::string> stage_of_peer(const node_context& context,
                                                const std::string& peer);

/// `layout_mismatch` unless it can be the layout of the rank that the deployment gives that node.
[[nodiscard]] result<void> check_layout_of(const node_settings& settings, const std::string& name,
                                           const kvcache::cache_layout& layout);

/// `layout_mismatch` unless the request of node `name` comes from the rank that its layout and the
/// deployment give it.
[[nodiscard]] result<void> check_rank_of(const node_settings& settings,
                                         const transfer_request& request, const std::string& name,
                                         const kvcache::cache_layout& layout);

/// `stale_incarnation` unless `node`, whose incarnation is `lives`, is the one that is meant; 0:
/// any.
[[nodiscard]] result<void> check_life(const std::string& node, std::uint64_t lives,
                                      std::uint64_t meant);

/// `invalid_config` if the cache has no pool of blocks.
[[nodiscard]] result<void> need_pool(const node_context& context);
/// `layout_mismatch` without a cache; `out_of_range` for a block or slot outside it.
[[nodiscard]] result<void> check_blocks(const node_context& context,
                                        std::span<const block_id> blocks, std::uint32_t slot);
/// The blocks of a send or a receive: one table for each of the layout's groups if it has any, else
/// one for all layers together. Errors as for `check_blocks`, and `invalid_config` for other
/// tables.
[[nodiscard]] result<void> check_tables(const node_context& context,
                                        const std::vector<block_id>& blocks,
                                        const std::vector<group_blocks>& groups,
                                        std::uint32_t slot);
/// Whether the operation has room for so many tokens.
[[nodiscard]] result<void> check_tokens(const operation_table::entry& entry, std::uint32_t tokens);

/// `not_found` if it has ended, or is no send.
[[nodiscard]] result<operation_table::entry> find_send(const node_context& context,
                                                       operation_id id);
/// Checks the layers that a send reports as computed: `already_exists` once it is sealed.
[[nodiscard]] result<void> check_ready(const node_context& context, operation_id send,
                                       std::uint32_t layer_begin, std::uint32_t layer_end,
                                       std::uint32_t token_end);
/// Checks a release or a hold.
[[nodiscard]] result<void> check_words(const node_context& context, const std::string& request,
                                       const std::vector<std::string>& sources,
                                       const std::vector<std::uint64_t>& lives);
/// Checks all but the request's id.
[[nodiscard]] result<void> check_receive(const node_context& context, const receive_spec& spec);
/// All blocks of the receive except those that hold only the prefix, which other requests may
/// share.
[[nodiscard]] std::span<const block_id> blocks_written(const receive_spec& spec,
                                                       std::uint32_t block_tokens);
/// Checks the layers of a receive that a stream waits for. Returns false if the receive is done, so
/// that all layers are there; for a receive that failed, its own error.
[[nodiscard]] result<bool> check_awaited(const node_context& context, operation_id receive,
                                         std::uint32_t layer_begin, std::uint32_t layer_end,
                                         std::uint32_t token_end);

}  // namespace troupe::actors
