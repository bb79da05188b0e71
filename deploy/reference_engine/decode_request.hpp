#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "troupe/deploy/reference_engine/worker.hpp"

namespace troupe::reference {

/// One text.
///
///   state      event                      next       what is done
///   ---------  -------------------------  ---------  --------------------------------------
///   waiting    slot and blocks are free   receiving  `receive`
///   waiting    deadline, abort            (gone)     answer with the error
///   receiving  done, rank 0               gathering  read the handoff; with one rank: decoding
///   receiving  done, another rank         handing    `put` its heads at rank 0
///   receiving  failed                     ended      answer, free the blocks
///   handing    done, failed               ended      answer, free the blocks
///   gathering  all other ranks' heads     decoding
///   decoding   step                       decoding   compute one token
///   decoding   the text is complete       ended      answer, keep or free the blocks
///   any live   deadline, abort            ended      answer, free the blocks
///   ended      unpinned (before, after)   (gone)     give the slot back
struct decode_request {
  enum class state : std::uint8_t { waiting, receiving, handing, gathering, decoding, ended };
  state now{state::waiting};
  decode_call what;
  std::function<void(result<payload>)> reply;
  clock::time_point deadline;
  operation_id operation;  ///< of the receive
  bool unpinned{false};
  held_blocks blocks;
  held_blocks pinned;  ///< until `unpinned`
  std::optional<std::uint32_t> slot;
  std::vector<paged_cache> others;  ///< the other ranks' heads, in memory of this process
  std::size_t gathered{0};          ///< number of `others` that are filled
  clock::time_point retry{};        ///< when to look again for a missing part
  std::vector<std::byte> handed;    ///< the value being put; must live until its outcome
  std::optional<model_cache> cache;
  generation text;
  decode_reply times;

  /// What had landed when, in tokens x layers, to compute how much was early.
  struct landing {
    std::int64_t at_ns{0};
    std::uint64_t amount{0};
  };
  std::vector<landing> landings;
  std::vector<std::uint32_t> landed;  ///< per layer: tokens

  [[nodiscard]] std::uint32_t prompt_tokens() const noexcept {
    return static_cast<std::uint32_t>(what.prompt.size());
  }
  /// Tokens whose keys and values are stored at the end: the last token's never are.
  [[nodiscard]] std::size_t final_tokens() const noexcept {
    return what.prompt.size() + what.max_tokens - 1;
  }
  void note_landed(const actors::cache_slice& slice);
  /// Fills `times.landed_early` and `times.computed_ns`.
  void judge_overlap(std::int64_t computed_ns);
};

}  // namespace troupe::reference
