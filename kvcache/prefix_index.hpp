#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <span>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "troupe/kvcache/ids.hpp"
#include "troupe/kvcache/result.hpp"

namespace troupe::kvcache {

/// The model's number of a token.
using token_id = std::uint32_t;

/// The hash of one block, given the hash of the blocks before it. Exchangeable so that a test can
/// make all hashes collide; the index never trusts a hash without comparing the tokens.
using block_hash = std::uint64_t (*)(std::uint64_t before, std::span<const token_id> tokens);
/// XXH3 over the tokens, seeded with `before`.
[[nodiscard]] std::uint64_t xxh3_block_hash(std::uint64_t before,
                                            std::span<const token_id> tokens) noexcept;

struct prefix_match {
  std::vector<block_id> blocks;  ///< of the prefix, in order
  std::uint64_t tokens{0};       ///< blocks.size() * block_tokens
};

struct prefix_counters {
  std::size_t blocks{0};
  std::uint64_t looked_up{0};  ///< tokens, since the start
  std::uint64_t matched{0};    ///< tokens, since the start
};

/// Which full blocks of which token sequences are in the cache, so that a request with a known
/// beginning moves and computes only the rest. A tree: a block is found only after the very blocks
/// that preceded it when it was computed. Holds block numbers, not memory: the caller keeps one
/// pool reference for every block in the index, and takes one more for each block that `match`
/// returns while using it. Not thread-safe. Costs depend on the tokens given, not on the size of
/// the index.
class prefix_index {
 public:
  /// `max_blocks` bounds the memory (4 bytes for each token, kept for comparison, and about 200
  /// bytes for each block).
  prefix_index(std::uint32_t block_tokens, std::size_t max_blocks,
               block_hash hash = &xxh3_block_hash);

  /// The longest cached prefix in whole blocks. `salt` separates sequences that must not be shared
  /// (tenants, adapters): only blocks inserted with the same salt are found. Counts as use.
  [[nodiscard]] prefix_match match(std::span<const token_id> tokens, std::uint64_t salt = 0);

  /// Inserts the whole blocks of `tokens`; `blocks[i]` holds tokens [i * block_tokens, ...). A
  /// known block for the same prefix stays. Returns the blocks that are new in the index; fewer
  /// when `max_blocks` is reached (`evict` first). `out_of_range` when there are more full blocks
  /// of tokens than blocks, `already_exists` when a block to add is in the index for other tokens:
  /// nothing changes then.
  [[nodiscard]] result<std::vector<block_id>> insert(std::span<const token_id> tokens,
                                                     std::span<const block_id> blocks,
                                                     std::uint64_t salt = 0);

  /// Forgets up to `count` blocks, the least recently used first, and a block only after its
  /// successors. Returns them, for the caller to give up its references.
  [[nodiscard]] std::vector<block_id> evict(std::size_t count);
  /// Forgets a block and all its successors (bad or overwritten content). Returns them; empty for a
  /// block that is not in the index.
  [[nodiscard]] std::vector<block_id> erase(block_id block);

  [[nodiscard]] prefix_counters counters() const noexcept;

 private:
  using node_number = std::uint64_t;  // 0: before the first block
  struct node {
    node_number parent{0};
    std::uint64_t salt{0};
    std::uint64_t hash{0};
    block_id block;
    std::vector<token_id> tokens;
    std::unordered_set<node_number> children;
    std::list<node_number>::iterator use;
  };
  /// The known part of a sequence: its nodes from the first block on, and the hash after the last.
  struct walk {
    std::vector<node_number> nodes;
    std::uint64_t hash{0};
  };

  [[nodiscard]] walk follow(std::span<const token_id> tokens, std::uint64_t salt) const;
  [[nodiscard]] node_number find_child(node_number parent, std::uint64_t hash, std::uint64_t salt,
                                       std::span<const token_id> tokens) const;
  void touch(const std::vector<node_number>& path);
  void forget(node_number number);

  std::uint32_t block_tokens_;
  std::size_t max_blocks_;
  block_hash hash_;
  std::unordered_map<node_number, node> nodes_;
  std::unordered_multimap<std::uint64_t, node_number> by_hash_;
  std::unordered_map<block_id, node_number> by_block_;
  std::list<node_number> by_use_;  // least recently used first; a child always before its parent
  node_number next_node_{1};
  prefix_counters counters_;
};

}  // namespace troupe::kvcache
