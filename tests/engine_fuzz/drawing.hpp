#pragma once

/// The steps that draw a scenario.

#include <cstdint>

#include "scenario.hpp"

namespace troupe::engine_fuzz {

/// Of a prompt.
inline constexpr std::uint32_t most_tokens_ever = 131'072;

/// Dice for features added later: all other dice then roll what they rolled before. `what` is a
/// different number for each feature.
[[nodiscard]] inline dice dice_beside(const scenario& s, std::uint64_t what) {
  return dice{s.seed * 0xD1342543DE82EF95ULL + (what << 40U)};
}

/// Draws layers with block tables of their own, and which of them lie over the same bytes.
void draw_groups(scenario& s);
/// Draws what either side has of each group for the requests of a round, and wrong calls about
/// groups.
void draw_windows(const scenario& s, round& now, dice& d);

/// Draws one round of a scenario, with requests of about `most_tokens` tokens together. The last
/// round may kill.
[[nodiscard]] round draw_round(scenario& s, std::uint32_t most_tokens, bool last, dice& d);

}  // namespace troupe::engine_fuzz
