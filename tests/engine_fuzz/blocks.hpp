#pragma once

/// Which owner has which blocks of a node's cache, in the engine's own memory or in the node's
/// pool.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "troupe/actors/engine.hpp"

#include "cache_model.hpp"
#include "lent_memory.hpp"
#include "scenario.hpp"
#include "tally.hpp"

namespace troupe::engine_fuzz {

/// The blocks that hold some tokens, for each group of layers.
struct held_blocks {
  block_tables tables;  ///< empty while the pool has yet to choose
  std::optional<kvcache::block_owner> owner;
  /// For each table, how many of its first blocks must not be given back: others share them, or
  /// they were given back already.
  std::vector<std::size_t> passed;
};

class cache_blocks {
 public:
  cache_blocks(const scenario& s, std::uint32_t node, engine& e, cache_model& model, finder found,
               dice& d);

  /// Takes blocks, in any order, for the tokens of each table, starting at the first token of a
  /// block. If `shares`, the blocks of the round's prefix come first.
  [[nodiscard]] held_blocks take(const std::vector<token_span>& tokens, bool shares,
                                 const std::string& whose);
  /// The blocks among them that are to be given back.
  [[nodiscard]] block_tables own(const held_blocks& of) const;
  void give_back(held_blocks& from, const std::string& whose);
  /// Gives back the first `count` pool blocks that hold only a prefix. They are the engine's, so
  /// they are free at once.
  void give_back_prefix(held_blocks& from, std::size_t count, const std::string& whose);
  /// A block for a value, if one is left.
  [[nodiscard]] std::optional<lent_block> lend();

  // -- the prefix that requests of a round share: prefill has computed it, decode has it from
  // earlier requests

  void begin_round(const round& now);
  /// Call when a transfer that shares the prefix has begun.
  void prefix_was_used();
  /// Compares the prefix and gives it back.
  void end_round();

  /// The node's report while nothing is live: empty if every block of the pool is free.
  [[nodiscard]] std::string what_is_missing() const;

 private:
  [[nodiscard]] result<kvcache::allocation> try_take(std::uint32_t table, std::size_t count);
  void free_some(held_blocks& from, std::uint32_t table, std::size_t count,
                 const std::string& whose);
  /// The pool that has the blocks of that table; own memory only.
  [[nodiscard]] std::uint32_t pool_of(std::uint32_t table) const {
    return its_.pools.empty() ? 0 : its_.pools[table];
  }
  void shuffle(std::vector<block_id>& blocks);
  [[nodiscard]] bool uses_prefix(const act& one) const;
  [[nodiscard]] content prefix_content() const;

  const scenario& s_;
  std::uint32_t node_;
  const side& its_;
  engine& engine_;
  cache_model& model_;
  finder found_;
  dice& dice_;
  const round* round_{nullptr};
  std::vector<std::vector<block_id>> free_;  ///< own memory: for each pool
  held_blocks prefix_;
  std::uint32_t prefix_uses_{0};  ///< still to come
};

}  // namespace troupe::engine_fuzz
