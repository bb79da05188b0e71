#pragma once

/// The parts that a scenario is drawn from.

#include <cstdint>

#include "scenario.hpp"

namespace troupe::engine_fuzz {

/// Of a prompt.
inline constexpr std::uint32_t most_tokens_ever = 131'072;

/// For what was not drawn from the beginning: the dice of everything else roll what they rolled before. `what`
/// is another number for each.
[[nodiscard]] inline dice dice_beside(const scenario& s, std::uint64_t what) {
  return dice{s.seed * 0xD1342543DE82EF95ULL + (what << 40U)};
}

/// Layers with block tables of their own, and which of those lie over the same bytes.
void draw_groups(scenario& s);
/// What of each group the requests of a round have at either side, and calls that are wrong about groups.
void draw_windows(const scenario& s, round& now, dice& d);

/// One of `count` of a scenario, with requests of about so many tokens together. The last one may kill.
[[nodiscard]] round draw_round(scenario& s, std::uint32_t most_tokens, bool last, dice& d);

}  // namespace troupe::engine_fuzz
