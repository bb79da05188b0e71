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

/// Makes the deployment of a scenario out of real nodes and lets its story happen.
[[nodiscard]] run_report run(const scenario& s);

}  // namespace troupe::engine_fuzz
