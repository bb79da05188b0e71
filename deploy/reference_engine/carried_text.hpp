#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "troupe/actors/request_carrier.hpp"
#include "troupe/deploy/reference_engine/calls.hpp"

namespace troupe::reference {

/// A text to be written by a cluster of reference engines.
struct text_order {
  std::string request;
  std::vector<token> prompt;
  std::uint32_t max_tokens{48};
  std::uint32_t chunk{0};  ///< tokens of the prompt that are computed at a time; 0: all
  sampling how;
  std::string from, to;  ///< stages; empty: those of the deployment's only edge
  std::chrono::milliseconds deadline{30'000};
};

/// The calls of both engines, for a `request_carrier`.
[[nodiscard]] actors::carried_request carried_text(const text_order& order);

}  // namespace troupe::reference
