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

/// Blocks of tokens 0, 1, ... of something.
struct held_blocks {
  std::vector<block_id> all;
  std::optional<kvcache::block_owner> owner;
  std::size_t shared{0};  ///< the first so many are others' as well, and not given back here
  std::size_t freed{0};   ///< so many of those behind them were given back before

  /// Those that are to be given back.
  [[nodiscard]] std::vector<block_id> own() const {
    return {all.begin() + static_cast<std::ptrdiff_t>(shared + freed), all.end()};
  }
};

class cache_blocks {
 public:
  cache_blocks(const scenario& s, std::uint32_t node, engine& e, cache_model& model, finder found,
               dice& d);

  /// `count` blocks in any order; where they share the prefix of the round its blocks come first.
  [[nodiscard]] held_blocks take(std::uint32_t count, bool shares, const std::string& whose);
  /// The first `count` of those to be given back.
  void give_back(held_blocks& from, std::size_t count, const std::string& whose);
  /// The same of blocks that hold a prefix only, which are the engine's: they are free at once.
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
  [[nodiscard]] result<held_blocks> try_take(std::uint32_t count);
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
  std::vector<block_id> free_;  ///< own memory
  held_blocks prefix_;
  std::uint32_t prefix_uses_{0};  ///< to come
};

}  // namespace troupe::engine_fuzz
