#pragma once

#include <memory>

#include "troupe/actors/engine.hpp"

namespace troupe::actors {

/// Wraps an engine for its user, so that no call throws. A lack of memory or threads becomes the
/// error of the call or, if the call returns none, a log line.
[[nodiscard]] std::unique_ptr<engine> with_edge(std::unique_ptr<engine> inner);

}  // namespace troupe::actors
