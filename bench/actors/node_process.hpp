#pragma once

#include <string>

#include "troupe/config/deployment.hpp"

/// The start of every process of a benchmark over nodes.
namespace troupe::bench {

/// Parses the text; if it is invalid, the process ends with all issues.
[[nodiscard]] config::deployment parsed(const std::string& text);

/// Lines of this process at the level that TROUPE_BENCH_LOG names, else at `level`.
void init_log(const std::string& name, const char* level);

}  // namespace troupe::bench
