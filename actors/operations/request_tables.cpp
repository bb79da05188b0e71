#include "troupe/actors/operations/request_tables.hpp"

#include <algorithm>
#include <limits>
#include <string>

namespace troupe::actors {

std::vector<request_table> tables_of(const kvcache::cache_layout& layout,
                                     const std::vector<block_id>& blocks,
                                     const std::vector<group_blocks>& groups) {
  std::vector<request_table> tables;
  if (layout.groups.empty()) {
    tables.emplace_back().blocks = blocks;
    return tables;
  }
  for (std::uint32_t i = 0; i < groups.size(); ++i) {
    tables.push_back(
        {groups[i].first_token / kvcache::block_tokens_of(layout, i), groups[i].blocks});
  }
  return tables;
}

std::vector<std::uint64_t> kept_of(const std::vector<group_blocks>& groups) {
  std::vector<std::uint64_t> kept;
  for (const auto& group : groups) kept.push_back(group.first_token);
  return kept;
}

std::vector<std::uint64_t> kept_of(const std::vector<group_table>& groups) {
  std::vector<std::uint64_t> kept;
  for (const auto& group : groups) kept.push_back(group.token_begin);
  return kept;
}

std::vector<std::uint64_t> kept_of(const std::vector<group_blocks>& groups,
                                   const kvcache::transfer_geometry& geometry,
                                   std::uint32_t tokens) {
  auto kept = kept_of(groups);
  for (std::uint32_t i = 0; i < kept.size(); ++i) {
    if (geometry.shares_table(i)) continue;
    // Rounded up to the first token of a block, as everywhere.
    const std::uint64_t block_tokens = geometry.block_tokens(i);
    const auto most = std::numeric_limits<std::uint32_t>::max() / block_tokens * block_tokens;
    kept[i] = std::min((tokens + block_tokens - 1) / block_tokens * block_tokens, most);
  }
  return kept;
}

std::vector<kvcache::block_table> as_block_tables(std::span<const request_table> tables,
                                                  std::span<const std::uint64_t> kept) {
  std::vector<kvcache::block_table> views;
  for (std::size_t i = 0; i < tables.size(); ++i) {
    const kvcache::block_list blocks{tables[i].blocks, tables[i].first};
    views.push_back({blocks, i < kept.size() ? kept[i] : 0});
  }
  return views;
}

kvcache::token_range kept_tokens(kvcache::token_range tokens, std::span<const std::uint64_t> kept,
                                 std::size_t table) noexcept {
  if (table < kept.size()) tokens.begin = std::max(tokens.begin, kept[table]);
  return tokens;
}

std::uint64_t room_of(const kvcache::cache_layout& layout,
                      std::span<const request_table> tables) noexcept {
  std::uint64_t room = std::numeric_limits<std::uint64_t>::max();
  for (std::uint32_t i = 0; i < tables.size(); ++i) {
    if (!kvcache::serves_layers(layout, i)) continue;
    room = std::min(
        room, (tables[i].first + tables[i].blocks.size()) * kvcache::block_tokens_of(layout, i));
  }
  return room;
}

std::optional<block_id> repeated_block(std::span<const std::uint32_t> pools,
                                       std::span<const request_table> tables) {
  if (tables.size() == 1) return kvcache::repeated_block(tables.front().blocks);
  for (std::size_t pool = 0; pool < tables.size(); ++pool) {
    std::vector<block_id> together;
    for (std::size_t i = pool; i < tables.size(); ++i) {
      if (pools[i] != pool) continue;
      together.insert(together.end(), tables[i].blocks.begin(), tables[i].blocks.end());
    }
    if (const auto twice = kvcache::repeated_block(together)) return twice;
  }
  return std::nullopt;
}

result<void> check_groups(const kvcache::cache_layout& layout,
                          std::span<const group_table> groups) {
  if (groups.size() != layout.groups.size()) {
    return fail(errc::layout_mismatch, "block tables of " + std::to_string(groups.size()) +
                                           " groups of layers are named; the cache here has " +
                                           std::to_string(layout.groups.size()));
  }
  for (std::uint32_t i = 0; i < groups.size(); ++i) {
    const auto block_tokens = kvcache::block_tokens_of(layout, i);
    if (groups[i].group == i && groups[i].token_begin % block_tokens == 0) continue;
    return fail(errc::out_of_range, "block table " + std::to_string(i) + " is of group " +
                                        std::to_string(groups[i].group) + " from token " +
                                        std::to_string(groups[i].token_begin) +
                                        " on; each group has its own, in order, and begins with a "
                                        "block of " +
                                        std::to_string(block_tokens) + " tokens");
  }
  return {};
}

std::uint64_t count_named(std::span<const kvcache::block_run> blocks,
                          std::span<const group_table> groups) noexcept {
  auto named = kvcache::count_blocks(blocks);
  for (const auto& group : groups) named += kvcache::count_blocks(group.blocks);
  return named;
}

std::uint64_t count_needed(const kvcache::cache_layout& layout, kvcache::token_range tokens,
                           std::span<const group_table> groups) noexcept {
  if (groups.empty()) return kvcache::blocks_in(tokens, layout.block_tokens);
  std::uint64_t needed = 0;
  for (std::uint32_t i = 0; i < groups.size(); ++i) {
    const kvcache::token_range kept{std::max<std::uint64_t>(tokens.begin, groups[i].token_begin),
                                    tokens.end};
    needed += kvcache::blocks_in(kept, kvcache::block_tokens_of(layout, i));
  }
  return needed;
}

std::size_t bytes_of(const transfer_request& request) noexcept {
  auto runs = request.blocks.size();
  for (const auto& group : request.groups) runs += group.blocks.size();
  auto total = runs * sizeof(kvcache::block_run) + request.groups.size() * sizeof(group_table) +
               request.grants.size() * sizeof(transport::remote_grant) +
               request.state_slots.size() * sizeof(std::uint32_t) + request.expect.size();
  if (request.progress) total += request.progress->here.size() * sizeof(std::uint32_t);
  return total;
}

}  // namespace troupe::actors
