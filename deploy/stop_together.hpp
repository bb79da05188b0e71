#pragma once

#include <chrono>
#include <functional>
#include <vector>

#include "troupe/deploy/child_process.hpp"

namespace troupe::deploy {

/// Processes of one cluster to stop.
struct ending_group {
  std::vector<child_process*> nodes;
  /// Stopped after the nodes, which deregister from it, have ended or used up their time. Null if
  /// there is none.
  child_process* supervisor{nullptr};
  /// For all of them together.
  std::chrono::milliseconds patience{std::chrono::seconds{8}};
  /// Polled; returning true ends the patience.
  std::function<bool()> hurried{};
};

/// Stops all processes at once, waits for them together, and kills those that still run when the
/// patience is over. Returns the killed ones. All have ended on return.
std::vector<child_process*> stop_together(const ending_group& group);

}  // namespace troupe::deploy
