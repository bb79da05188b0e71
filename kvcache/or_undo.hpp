#pragma once

#include <utility>

namespace troupe {

/// Runs `step`. If it throws, runs `undo`, which reverts the step before it, and rethrows. For an
/// entry that must be in both of two containers or in neither.
template <class Step, class Undo>
void or_undo(Step&& step, Undo&& undo) {
  try {
    std::forward<Step>(step)();
  } catch (...) {
    std::forward<Undo>(undo)();
    throw;
  }
}

}  // namespace troupe
