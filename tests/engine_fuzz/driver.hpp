#pragma once

#include <string>
#include <vector>

#include "node.hpp"
#include "scenario.hpp"

namespace troupe::engine_fuzz {

struct run_report {
  std::vector<std::string> findings;
  tally counts;
};

/// Builds the deployment of a scenario from real nodes and runs its story.
[[nodiscard]] run_report run(const scenario& s);

}  // namespace troupe::engine_fuzz
