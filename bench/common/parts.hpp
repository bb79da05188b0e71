#pragma once

/// Parts of a benchmark, each in processes of its own.

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "processes.hpp"
#include "rows.hpp"

namespace troupe::bench {

/// From a part to the process that runs it; a line for readers goes to standard error.
void give(const control& runner, const row& r, const std::string& detail = {});

/// Runs one part and returns its rows as JSON. A part that does not end within `limit` after its
/// last row ends the benchmark, and all of the part's processes with it.
[[nodiscard]] std::vector<std::string> part(const std::function<void(const control&)>& body,
                                            std::chrono::seconds limit = std::chrono::minutes{15});

}  // namespace troupe::bench
