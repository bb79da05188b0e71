#pragma once

#include <utility>

namespace troupe {

/// Takes `step`; where it throws, `undo` takes back what came before it, and the exception goes on. For what two lists
/// must have both or neither.
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
