#include "troupe/kvcache/prefix_index.hpp"

#include <algorithm>
#include <string>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace troupe::kvcache {

std::uint64_t xxh3_block_hash(std::uint64_t before, std::span<const token_id> tokens) noexcept {
  return XXH3_64bits_withSeed(tokens.data(), tokens.size_bytes(), before);
}

prefix_index::prefix_index(std::uint32_t block_tokens, std::size_t max_blocks, block_hash hash)
    : block_tokens_{std::max<std::uint32_t>(1, block_tokens)},
      max_blocks_{max_blocks},
      hash_{hash} {}

prefix_index::node_number prefix_index::find_child(node_number parent, std::uint64_t hash,
                                                   std::uint64_t salt,
                                                   std::span<const token_id> tokens) const {
  const auto [first, last] = by_hash_.equal_range(hash);
  const auto found = std::find_if(first, last, [&](const auto& entry) {
    const node& n = nodes_.find(entry.second)->second;
    return n.parent == parent && n.salt == salt &&
           std::equal(n.tokens.begin(), n.tokens.end(), tokens.begin(), tokens.end());
  });
  return found == last ? 0 : found->second;
}

prefix_index::walk prefix_index::follow(std::span<const token_id> tokens,
                                        std::uint64_t salt) const {
  walk w{{}, salt};
  node_number parent = 0;
  for (; tokens.size() >= block_tokens_; tokens = tokens.subspan(block_tokens_)) {
    const auto block = tokens.first(block_tokens_);
    const std::uint64_t hash = hash_(w.hash, block);
    const node_number child = find_child(parent, hash, salt, block);
    if (child == 0) break;
    w.nodes.push_back(child);
    w.hash = hash;
    parent = child;
  }
  return w;
}

/// From the last block to the first, so that a block is never older than its successors.
void prefix_index::touch(const std::vector<node_number>& path) {
  for (auto number = path.rbegin(); number != path.rend(); ++number) {
    by_use_.splice(by_use_.end(), by_use_, nodes_.find(*number)->second.use);
  }
}

prefix_match prefix_index::match(std::span<const token_id> tokens, std::uint64_t salt) {
  const walk known = follow(tokens, salt);
  touch(known.nodes);
  prefix_match found;
  found.blocks.reserve(known.nodes.size());
  for (const auto number : known.nodes) found.blocks.push_back(nodes_.find(number)->second.block);
  found.tokens = std::uint64_t{known.nodes.size()} * block_tokens_;
  counters_.looked_up += tokens.size();
  counters_.matched += found.tokens;
  return found;
}

result<std::vector<block_id>> prefix_index::insert(std::span<const token_id> tokens,
                                                   std::span<const block_id> blocks,
                                                   std::uint64_t salt) {
  const std::size_t full = tokens.size() / block_tokens_;
  if (blocks.size() < full) {
    return fail(errc::out_of_range, "prefix index: " + std::to_string(full) +
                                        " full blocks of tokens, but " +
                                        std::to_string(blocks.size()) + " blocks");
  }
  walk path = follow(tokens, salt);
  const std::size_t known = path.nodes.size();
  const std::size_t room = max_blocks_ - std::min(max_blocks_, nodes_.size());
  const std::size_t end = known + std::min(room, full - known);
  std::vector<block_id> added{blocks.begin() + static_cast<std::ptrdiff_t>(known),
                              blocks.begin() + static_cast<std::ptrdiff_t>(end)};
  auto sorted = added;
  std::sort(sorted.begin(), sorted.end());
  const bool twice = std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end();
  for (const auto block : added) {
    if (twice || by_block_.contains(block)) {
      return fail(errc::already_exists, "prefix index: block " + std::to_string(block.value) +
                                            (twice ? " or another is named twice"
                                                   : " is known for other tokens; erase it first"));
    }
  }
  for (std::size_t i = known; i < end; ++i) {
    const auto part = tokens.subspan(i * block_tokens_, block_tokens_);
    const node_number number = next_node_++;
    node fresh;
    fresh.parent = path.nodes.empty() ? 0 : path.nodes.back();
    fresh.salt = salt;
    fresh.hash = path.hash = hash_(path.hash, part);
    fresh.block = blocks[i];
    fresh.tokens.assign(part.begin(), part.end());
    fresh.use = by_use_.insert(by_use_.end(), number);
    if (fresh.parent != 0) nodes_.find(fresh.parent)->second.children.insert(number);
    by_hash_.emplace(fresh.hash, number);
    by_block_.emplace(fresh.block, number);
    nodes_.emplace(number, std::move(fresh));
    path.nodes.push_back(number);
  }
  touch(path.nodes);
  return added;
}

std::vector<block_id> prefix_index::evict(std::size_t count) {
  std::vector<block_id> gone;
  while (gone.size() < count && !by_use_.empty()) {
    const node_number oldest = by_use_.front();
    gone.push_back(nodes_.find(oldest)->second.block);
    forget(oldest);
  }
  return gone;
}

std::vector<block_id> prefix_index::erase(block_id block) {
  const auto found = by_block_.find(block);
  if (found == by_block_.end()) return {};
  std::vector<node_number> doomed{found->second};
  for (std::size_t i = 0; i < doomed.size(); ++i) {
    const auto& children = nodes_.find(doomed[i])->second.children;
    doomed.insert(doomed.end(), children.begin(), children.end());
  }
  std::vector<block_id> gone;
  for (auto number = doomed.rbegin(); number != doomed.rend(); ++number) {
    gone.push_back(nodes_.find(*number)->second.block);
    forget(*number);
  }
  return gone;
}

/// Removes a block without successors.
void prefix_index::forget(node_number number) {
  const auto at = nodes_.find(number);
  const node& n = at->second;
  if (n.parent != 0) nodes_.find(n.parent)->second.children.erase(number);
  const auto [first, last] = by_hash_.equal_range(n.hash);
  by_hash_.erase(std::find_if(first, last, [number](const auto& e) { return e.second == number; }));
  by_block_.erase(n.block);
  by_use_.erase(n.use);
  nodes_.erase(at);
}

prefix_counters prefix_index::counters() const noexcept {
  prefix_counters counters = counters_;
  counters.blocks = nodes_.size();
  return counters;
}

}  // namespace troupe::kvcache
