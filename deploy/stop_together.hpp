#pragma once

#include <chrono>
#include <functional>
#include <vector>

#include "troupe/deploy/child_process.hpp"

namespace troupe::deploy {

/// Processes of one cluster that are to end.
struct ending_group {
  std::vector<child_process*> nodes;
  /// Told once the nodes, which say goodbye to it, have ended or had their time for that. Null: there
  /// is none.
  child_process* supervisor{nullptr};
  /// With all of them together.
  std::chrono::milliseconds patience{std::chrono::seconds{8}};
  /// Asked again and again; true ends the patience.
  std::function<bool()> hurried{};
};

/// Tells all of them to stop, waits for all of them at once, and kills at once those that still run
/// when the patience is over. Returns these. All have ended.
std::vector<child_process*> stop_together(const ending_group& group);

}  // namespace troupe::deploy
