#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "troupe/kvcache/ids.hpp"

namespace troupe::kvcache {

/// Positions [begin, end) in the request. `begin > 0` leaves out a prefix that is already present,
/// or earlier chunks; neither end need be at a block boundary.
struct token_range {
  std::uint64_t begin{0};
  std::uint64_t end{0};
  friend bool operator==(const token_range&, const token_range&) = default;
};

/// How many blocks of `block_tokens` tokens these positions touch; 0 for an empty range.
[[nodiscard]] constexpr std::uint64_t blocks_in(token_range tokens,
                                                std::uint64_t block_tokens) noexcept {
  if (tokens.begin >= tokens.end) return 0;
  return (tokens.end - 1) / block_tokens - tokens.begin / block_tokens + 1;
}

/// Blocks of a request in the order of its tokens, from number `first` on: entry i holds the tokens
/// [(first + i) * block_tokens, (first + i + 1) * block_tokens). Does not own them.
struct block_list {
  std::span<const block_id> blocks{};
  std::uint64_t first{0};

  block_list() = default;
  /// A list that starts at the request's first token.
  // NOLINTBEGIN(google-explicit-constructor): it is that list
  template <class Blocks>
  requires std::convertible_to<const Blocks&, std::span<const block_id>> block_list(
      const Blocks& all)
      : blocks{all} {}
  // NOLINTEND(google-explicit-constructor)
  block_list(std::span<const block_id> some, std::uint64_t from) : blocks{some}, first{from} {}

  /// One past the number of the last block.
  [[nodiscard]] std::uint64_t end() const noexcept { return first + blocks.size(); }
  /// The block of a number, which must be in the list.
  [[nodiscard]] block_id operator[](std::uint64_t number) const noexcept {
    return blocks[static_cast<std::size_t>(number - first)];
  }
};

/// A request's blocks for one group of layers, and the first of its tokens that they keep. Does not
/// own the blocks.
struct block_table {
  block_list blocks{};
  std::uint64_t from{0};  ///< tokens before this one are not kept

  block_table() = default;
  // NOLINTBEGIN(google-explicit-constructor): a table of all tokens
  block_table(block_list all) : blocks{all} {}
  block_table(std::span<const block_id> all) : blocks{all} {}
  block_table(const std::vector<block_id>& all) : blocks{all} {}
  // NOLINTEND(google-explicit-constructor)
  block_table(block_list some, std::uint64_t token) : blocks{some}, from{token} {}

  /// The part of a range that is kept.
  [[nodiscard]] constexpr token_range kept_of(token_range tokens) const noexcept {
    return {tokens.begin < from ? from : tokens.begin, tokens.end};
  }
};

/// Blocks `begin`, `begin` + 1, ... of a pool.
struct block_run {
  block_id begin;
  std::uint32_t count{1};
  friend bool operator==(const block_run&, const block_run&) = default;
};

/// The fewest runs that name the same blocks in the same order.
[[nodiscard]] std::vector<block_run> runs_of(std::span<const block_id> blocks);
/// How many blocks the runs name.
[[nodiscard]] std::uint64_t count_blocks(std::span<const block_run> runs) noexcept;
/// The reverse of `runs_of`. A run of a few bytes can name any number of blocks: check
/// `count_blocks` first.
[[nodiscard]] std::vector<block_id> blocks_of(std::span<const block_run> runs);

/// A block that is named more than once, if any.
[[nodiscard]] std::optional<block_id> repeated_block(std::span<const block_id> blocks);

}  // namespace troupe::kvcache
