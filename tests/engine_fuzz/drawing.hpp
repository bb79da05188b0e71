#pragma once

/// The parts that a scenario is drawn from.

#include <cstdint>

#include "scenario.hpp"

namespace troupe::engine_fuzz {

/// Of a prompt.
inline constexpr std::uint32_t most_tokens_ever = 131'072;

/// One of `count` of a scenario, with requests of about so many tokens together. The last one may kill.
[[nodiscard]] round draw_round(scenario& s, std::uint32_t most_tokens, bool last, dice& d);

}  // namespace troupe::engine_fuzz
