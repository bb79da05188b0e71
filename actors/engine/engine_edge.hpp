#pragma once

#include <memory>

#include "troupe/actors/engine.hpp"

namespace troupe::actors {

/// The same engine as its user has it: no call throws. What could not be had (memory, a thread) comes
/// back as the error of the call, where it returns one, and is logged where it does not.
[[nodiscard]] std::unique_ptr<engine> with_edge(std::unique_ptr<engine> inner);

}  // namespace troupe::actors
