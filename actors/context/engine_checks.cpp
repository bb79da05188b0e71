#include "troupe/actors/context/engine_checks.hpp"

#include <algorithm>
#include <optional>
#include <vector>

#include "troupe/actors/base/phrases.hpp"
#include "troupe/actors/context/deployment_place.hpp"
#include "troupe/actors/messages/member_list.hpp"
#include "troupe/actors/operations/request_tables.hpp"
#include "troupe/kvcache/block_list.hpp"
#include "troupe/kvcache/layer_parts.hpp"

namespace troupe::actors {

namespace {

result<void> check_layers(const node_context& context, std::uint32_t begin, std::uint32_t end) {
  const auto layers = context.layout ? context.layout->layers.size() : 0;
  if (begin < end && end <= layers) return {};
  return fail(errc::out_of_range, "layers [" + std::to_string(begin) + ", " + std::to_string(end) +
                                      ") of " + std::to_string(layers));
}

}  // namespace

result<void> check_request(const std::string& request) {
  if (!request.empty() && request.size() <= max_request_id) return {};
  return fail(errc::invalid_config, "a request id has 1 to " + std::to_string(max_request_id) +
                                        " bytes, this one " + std::to_string(request.size()));
}

result<void> check_affinity(const std::string& affinity) {
  if (affinity.size() <= max_affinity) return {};
  return fail(errc::invalid_config, "an affinity has at most " + std::to_string(max_affinity) +
                                        " bytes, this has " + std::to_string(affinity.size()) +
                                        "; name a hash of it");
}

result<void> check_key(const std::string& key) {
  if (key.empty() || key.size() > max_key || key.front() == '\0') {
    return fail(errc::invalid_config, "a key has 1 to " + std::to_string(max_key) +
                                          " bytes and does not begin with a zero byte");
  }
  return {};
}

result<void> check_node(const node_context& context, const std::string& name) {
  if (deployment_place(context.settings, name)) return {};
  return fail(errc::not_found, "the deployment has no node `" + name + "`");
}

result<void> check_nodes(const node_context& context, const std::vector<std::string>& names) {
  for (const auto& name : names) {
    if (auto known = check_node(context, name); !known) return known;
  }
  return {};
}

namespace {

std::string rank_of(std::uint32_t rank, std::uint32_t ranks) {
  return "rank " + std::to_string(rank) + " of " + std::to_string(ranks);
}

/// For a replica that the file names: whether the sources include all its ranks.
result<void> check_complete(const node_settings& settings, const std::string& first_name,
                            const node_place& first,
                            const std::vector<const std::string*>& by_rank) {
  for (const auto& [name, place] : settings.nodes) {
    if (!same_replica(place, first) || by_rank[place.rank] != nullptr) continue;
    return fail(errc::invalid_config, "`" + name + "` is missing among the sources: it is " +
                                          rank_of(place.rank, place.ranks) +
                                          " of the replica of `" + first_name +
                                          "`, and a receive takes from every rank of a replica");
  }
  return {};
}

/// Whether these are the ranks of one replica, each once: each rank sends something that no other
/// does. Only the nodes of an open stage know how many ranks its replicas have.
result<void> check_sources(const node_context& context, const std::string& request,
                           const std::vector<std::string>& names) {
  if (names.empty()) {
    return fail(errc::invalid_config, "name the prefill nodes that have request `" + request + "`");
  }
  if (auto known = check_nodes(context, names); !known) return known;
  const auto first = *deployment_place(context.settings, names.front());
  std::vector<const std::string*> by_rank(first.ranks != 0 ? first.ranks : names.size());
  for (const auto& name : names) {
    const auto place = *deployment_place(context.settings, name);
    if (!same_replica(place, first)) {
      return fail(errc::invalid_config,
                  "`" + names.front() + "` and `" + name +
                      "` belong to different replicas; name the ranks of one");
    }
    if (place.rank >= by_rank.size()) {
      return fail(errc::invalid_config, "`" + name + "` is rank " + std::to_string(place.rank) +
                                            " of a replica of which " +
                                            count_of(names.size(), "rank") +
                                            " are named; name all of them");
    }
    if (by_rank[place.rank] != nullptr) {
      return fail(errc::invalid_config, "`" + name + "` is named twice among the sources");
    }
    by_rank[place.rank] = &name;
  }
  const auto& own = context.self.name;
  if (std::ranges::find(names, own) != names.end()) {
    return fail(errc::invalid_config,
                "`" + own + "` is this node itself; what it has it does not receive");
  }
  return check_complete(context.settings, names.front(), first, by_rank);
}

/// The mode of an edge between two stages; `wanted` if one of several edges has it.
result<transfer_mode> mode_of_edge(const node_settings& settings, const std::string& from,
                                   const std::string& to,
                                   std::optional<transfer_mode> wanted = std::nullopt) {
  const auto [first, last] = settings.edges.equal_range({from, to});
  std::optional<transfer_mode> any;
  for (auto edge = first; edge != last; ++edge) {
    if (edge->second && (!any || edge->second == wanted)) any = edge->second;
  }
  if (any) return *any;
  return fail(errc::invalid_config,
              "the deployment has no edge over which layers move from stage `" + from + "` to `" +
                  to + "`; add it to its `edges`");
}

}  // namespace

result<void> check_any_edge(const node_settings& settings, const std::string& from,
                            const std::string& to) {
  auto mode = mode_of_edge(settings, from, to);
  if (!mode) return fail(std::move(mode).error());
  return {};
}

result<void> check_edge(const node_settings& settings, const std::string& from,
                        const std::string& to, transfer_mode mode) {
  auto other = mode_of_edge(settings, from, to, mode);
  if (!other) return fail(std::move(other).error());
  if (*other == mode) return {};
  return fail(errc::invalid_config, "mode " + std::string{to_string(mode)} +
                                        " where the deployment's edge from stage `" + from +
                                        "` to `" + to + "` has " + std::string{to_string(*other)} +
                                        "; take the mode of the placement, or change the edge");
}

result<void> check_value_edge(const node_context& context, const std::string& peer) {
  if (peer == context.self.name) return {};
  if (auto known = check_node(context, peer); !known) return known;
  const auto to = deployment_place(context.settings, peer)->stage;
  const auto& from = context.self.stage;
  const auto& edges = context.settings.edges;
  if (to == from || edges.contains({from, to}) || edges.contains({to, from})) return {};
  return fail(errc::invalid_config, "the deployment has no edge between stage `" + from +
                                        "` and `" + (to.empty() ? peer : to) +
                                        "`; add it to its `edges`");
}

result<std::string> stage_of_peer(const node_context& context, const std::string& peer) {
  if (auto place = deployment_place(context.settings, peer)) return std::move(place->stage);
  // If there are open stages, a node that the file does not name must be of one of them.
  if (!is_open_name(peer) && context.settings.open_stages.empty()) return std::string{};
  return fail(errc::unauthorized,
              "`" + peer + "` is not a node of the deployment of `" + context.self.name +
                  "`, nor of one of its open stages; run both with the same file");
}

result<void> check_layout_of(const node_settings& settings, const std::string& name,
                             const kvcache::cache_layout& layout) {
  const auto place = deployment_place(settings, name);
  if (!place) return {};  // of a larger deployment than this node was told of
  // The name of a node of an open stage does not say how many ranks its replica has.
  std::optional<std::uint32_t> ranks;
  if (place->ranks != 0) ranks = place->ranks;
  const auto wrong = kvcache::contradicts_rank(layout, place->rank, ranks);
  if (!wrong) return {};
  return fail(errc::layout_mismatch,
              "the deployment makes `" + name + "` " +
                  (ranks ? rank_of(place->rank, *ranks) : "rank " + std::to_string(place->rank)) +
                  ", its layout " + *wrong);
}

result<void> check_rank_of(const node_settings& settings, const transfer_request& request,
                           const std::string& name, const kvcache::cache_layout& layout) {
  const auto said = "the request says " + rank_of(request.rank, request.ranks);
  if (const auto wrong = kvcache::contradicts_rank(layout, request.rank, request.ranks)) {
    return fail(errc::layout_mismatch, said + ", the layout of `" + name + "` " + *wrong);
  }
  const auto place = deployment_place(settings, name);
  if (!place || place->rank == request.rank) return {};
  return fail(errc::layout_mismatch,
              said + ", the deployment makes `" + name + "` rank " + std::to_string(place->rank));
}

result<void> check_life(const std::string& node, std::uint64_t lives, std::uint64_t meant) {
  if (meant == 0 || meant == lives) return {};
  return fail(errc::stale_incarnation, node + " runs as incarnation " + life_text(lives) +
                                           ", the request means " + life_text(meant) +
                                           "; what that incarnation held is gone");
}

result<void> need_pool(const node_context& context) {
  if (context.pool) return {};
  return fail(errc::invalid_config,
              context.self.name +
                  " has no pool of blocks: the layout is the engine's own, or "
                  "the deployment gives its stage no model");
}

result<void> check_blocks(const node_context& context, std::span<const block_id> blocks,
                          std::uint32_t slot) {
  if (!context.layout) return fail(errc::layout_mismatch, context.self.name + " has no cache");
  const auto& layout = *context.layout;
  for (const auto block : blocks) {
    if (block.value >= layout.blocks) {
      return fail(errc::out_of_range, "block " + std::to_string(block.value) + " of a cache of " +
                                          std::to_string(layout.blocks) + " blocks");
    }
  }
  for (const auto& state : layout.states) {
    if (slot >= state.slots) {
      return fail(errc::out_of_range,
                  "state slot " + std::to_string(slot) + " of " + std::to_string(state.slots));
    }
  }
  return {};
}

result<void> check_tables(const node_context& context, const std::vector<block_id>& blocks,
                          const std::vector<group_blocks>& groups, std::uint32_t slot) {
  if (auto fine = check_blocks(context, blocks, slot); !fine) return fine;
  const auto& layout = *context.layout;
  if (groups.size() != layout.groups.size() || (!layout.groups.empty() && !blocks.empty())) {
    return fail(errc::invalid_config,
                "blocks are named for " + count_of(groups.size(), "group") + " of layers" +
                    (blocks.empty() ? "" : ", and for all layers") + "; the layout has " +
                    count_of(layout.groups.size(), "group") +
                    (layout.groups.empty() ? ": name `blocks`" : ": name one table for each"));
  }
  for (std::uint32_t i = 0; i < groups.size(); ++i) {
    const auto name = "group " + std::to_string(i) + ": ";
    const auto block_tokens = kvcache::block_tokens_of(layout, i);
    if (groups[i].first_token % block_tokens != 0) {
      return fail(errc::invalid_config, name + "token " + std::to_string(groups[i].first_token) +
                                            " is not the first of a block of " +
                                            std::to_string(block_tokens));
    }
    if (auto fine = check_blocks(context, groups[i].blocks, slot); !fine) {
      return fail(fine.error().code, name + fine.error().message);
    }
  }
  return {};
}

result<void> check_tokens(const operation_table::entry& entry, std::uint32_t tokens) {
  if (tokens <= entry.token_capacity) return {};
  return fail(errc::out_of_range, std::to_string(tokens) +
                                      " tokens do not fit the blocks of request `" + entry.request +
                                      "`, which hold " + std::to_string(entry.token_capacity));
}

result<operation_table::entry> find_send(const node_context& context, operation_id id) {
  auto entry = context.operations.find(id);
  if (entry && entry->kind != operation_kind::send) {
    return fail(errc::not_found, "operation " + std::to_string(id.value) + " is not a send");
  }
  return entry;
}

result<void> check_ready(const node_context& context, operation_id send, std::uint32_t layer_begin,
                         std::uint32_t layer_end, std::uint32_t token_end) {
  auto entry = find_send(context, send);
  if (!entry) return fail(entry.error());
  if (auto fine = check_layers(context, layer_begin, layer_end); !fine) return fine;
  if (entry->sealed)
    return fail(errc::already_exists, "request `" + entry->request + "` is sealed");
  return check_tokens(*entry, token_end);
}

namespace {

result<void> check_lives(const std::vector<std::uint64_t>& lives,
                         const std::vector<std::string>& sources) {
  if (lives.empty() || lives.size() == sources.size()) return {};
  return fail(errc::invalid_config, count_of(lives.size(), "incarnation") + " for " +
                                        count_of(sources.size(), "source") +
                                        "; name one for each, 0 where any will do");
}

}  // namespace

result<void> check_words(const node_context& context, const std::string& request,
                         const std::vector<std::string>& sources,
                         const std::vector<std::uint64_t>& lives) {
  if (auto fine = check_request(request); !fine) return fine;
  if (auto fine = check_sources(context, request, sources); !fine) return fine;
  if (auto fine = check_lives(lives, sources); !fine) return fine;
  return check_any_edge(context.settings,
                        deployment_place(context.settings, sources.front())->stage,
                        context.self.stage);
}

result<void> check_receive(const node_context& context, const receive_spec& spec) {
  if (auto fine = check_tables(context, spec.blocks, spec.groups, spec.state_slot); !fine) {
    return fine;
  }
  if (auto fine = check_sources(context, spec.request, spec.sources); !fine) return fine;
  if (auto fine = check_edge(context.settings,
                             deployment_place(context.settings, spec.sources.front())->stage,
                             context.self.stage, spec.mode);
      !fine) {
    return fine;
  }
  if (auto fine = check_lives(spec.lives, spec.sources); !fine) return fine;
  if (spec.park && spec.park->count() < 0) {
    return fail(errc::invalid_config, "a time to park is not negative");
  }
  if (spec.expect.size() > max_expect) {
    return fail(errc::out_of_range, "expect has " + std::to_string(spec.expect.size()) +
                                        " bytes, at most " + std::to_string(max_expect) +
                                        " are compared; name a hash");
  }
  const auto& layout = *context.layout;
  const bool grouped = !layout.groups.empty();
  std::vector<request_table> tables;
  if (grouped) tables = tables_of(layout, spec.blocks, spec.groups);
  const auto twice =
      grouped ? repeated_block(context.table_pools, tables) : kvcache::repeated_block(spec.blocks);
  if (twice) {
    return fail(errc::invalid_config, "block " + std::to_string(twice->value) +
                                          " is named twice: two pieces of the cache would be "
                                          "written to the same place");
  }
  if (spec.prefix_tokens > spec.tokens) {
    return fail(errc::out_of_range, "a prefix of " + std::to_string(spec.prefix_tokens) +
                                        " tokens of a request of " + std::to_string(spec.tokens));
  }
  if (grouped) {
    const auto room = room_of(layout, tables);
    if (spec.tokens <= room) return {};
    return fail(errc::out_of_range, "the blocks of a group of layers reach to token " +
                                        std::to_string(room) + ", the request has " +
                                        std::to_string(spec.tokens));
  }
  const auto needed = kvcache::blocks_in({0, spec.tokens}, layout.block_tokens);
  if (spec.blocks.empty() && spec.prefix_tokens > 0) {
    return fail(errc::invalid_config,
                "a request with a prefix names the blocks that the prefix is in");
  }
  if (!spec.blocks.empty() && spec.blocks.size() < needed) {
    return fail(errc::out_of_range, std::to_string(spec.blocks.size()) + " blocks for " +
                                        std::to_string(spec.tokens) + " tokens, " +
                                        std::to_string(needed) + " are needed");
  }
  if (spec.blocks.empty() && needed > layout.blocks) {
    return fail(errc::pool_exhausted, "request `" + spec.request + "` needs " +
                                          std::to_string(needed) + " blocks, the whole pool has " +
                                          std::to_string(layout.blocks));
  }
  if (spec.blocks.empty() && needed > 0) return need_pool(context);
  return {};
}

std::span<const block_id> blocks_written(const receive_spec& spec, std::uint32_t block_tokens) {
  const std::span all{spec.blocks};
  return all.subspan(std::min<std::size_t>(spec.prefix_tokens / block_tokens, all.size()));
}

result<bool> check_awaited(const node_context& context, operation_id receive,
                           std::uint32_t layer_begin, std::uint32_t layer_end,
                           std::uint32_t token_end) {
  const auto live = context.operations.find(receive);
  // Looked up second: a receive that ends meanwhile is in one of the two.
  const auto ended = live ? std::nullopt : context.operations.ended(receive);
  if (!live && !ended) return fail(live.error());
  if (live && live->kind != operation_kind::receive) {
    return fail(errc::not_found,
                "operation " + std::to_string(receive.value) + " is not a receive");
  }
  if (auto fine = check_layers(context, layer_begin, layer_end); !fine) return fail(fine.error());
  const auto tokens = live ? live->token_capacity : ended->token_capacity;
  if (token_end > tokens) {
    return fail(errc::out_of_range, "token " + std::to_string(token_end) + " of a receive of " +
                                        std::to_string(tokens) + " tokens");
  }
  if (ended && ended->failure) return fail(*ended->failure);
  return live.has_value();
}

}  // namespace troupe::actors
