#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "troupe/deploy/reference_engine/block_source.hpp"
#include "troupe/deploy/reference_engine/model_config.hpp"

namespace troupe::reference {

/// Blocks that finished requests left, oldest first, for requests whose prompts begin alike. An
/// entry is taken over whole and never shared: a block belongs to one request at a time. Not
/// thread-safe.
class kept_prefixes {
 public:
  struct entry {
    std::vector<token> prompt;  ///< its cache is in the blocks
    held_blocks blocks;
  };
  explicit kept_prefixes(std::size_t limit) : limit_{limit} {}

  [[nodiscard]] bool empty() const noexcept { return entries_.empty(); }

  /// Blocks of the longest prefix shared with `prompt`, and its number of tokens. `surplus` are the
  /// entry's remaining blocks: the caller frees them. All empty if less than a block is known.
  struct match {
    std::uint32_t tokens{0};
    held_blocks blocks;
    held_blocks surplus;
  };
  [[nodiscard]] match take(const std::vector<token>& prompt, std::uint32_t block_tokens);
  /// Keeps an entry; returns the blocks of the entries evicted for it, to be freed.
  [[nodiscard]] held_blocks keep(entry what);
  /// Forgets everything; returns all blocks, to be freed.
  [[nodiscard]] held_blocks clear();

 private:
  std::size_t limit_;
  std::deque<entry> entries_;
};

}  // namespace troupe::reference
