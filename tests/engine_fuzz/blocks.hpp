#pragma once

/// Which blocks of a node's cache are whose, and in which order: of the engine's own memory, or of the node's pool.

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

/// Blocks of the tokens of something, of each group of layers.
struct held_blocks {
  block_tables tables;  ///< none yet where the pool is to choose
  std::optional<kvcache::block_owner> owner;
  /// Of each table: the first so many are not to be given back, since others share them, or it was done.
  std::vector<std::size_t> passed;
};

class cache_blocks {
 public:
  cache_blocks(const scenario& s, std::uint32_t node, engine& e, cache_model& model, finder found,
               dice& d);

  /// Blocks in any order for tokens of each table, from the first one of a block on; where they share the prefix
  /// of the round its blocks come first.
  [[nodiscard]] held_blocks take(const std::vector<token_span>& tokens, bool shares,
                                 const std::string& whose);
  /// Those of them that are to be given back.
  [[nodiscard]] block_tables own(const held_blocks& of) const;
  void give_back(held_blocks& from, const std::string& whose);
  /// The first `count` of the pool's that hold a prefix only, which are the engine's: they are free at once.
  void give_back_prefix(held_blocks& from, std::size_t count, const std::string& whose);
  /// A block for a value, where there is one left.
  [[nodiscard]] std::optional<lent_block> lend();

  // -- the prefix that requests of a round share: prefill has computed it, decode has it from earlier ones

  void begin_round(const round& now);
  /// A transfer that shares it has begun.
  void prefix_was_used();
  /// Compares it and gives it back.
  void end_round();

  /// As the node says it, with nothing live: empty where every block of the pool is free.
  [[nodiscard]] std::string what_is_missing() const;

 private:
  [[nodiscard]] result<kvcache::allocation> try_take(std::uint32_t table, std::size_t count);
  void free_some(held_blocks& from, std::uint32_t table, std::size_t count,
                 const std::string& whose);
  /// Which of several has the blocks of that table; own memory.
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
  std::vector<std::vector<block_id>> free_;  ///< own memory: of each pool
  held_blocks prefix_;
  std::uint32_t prefix_uses_{0};  ///< to come
};

}  // namespace troupe::engine_fuzz
