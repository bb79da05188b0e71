#pragma once

#include <string>

#include "troupe/config/deployment.hpp"

/// What every process of a benchmark over nodes begins with.
namespace troupe::bench {

/// What the text says; the process ends with all that is wrong with it.
[[nodiscard]] config::deployment parsed(const std::string& text);

/// Lines of this process at the level that TROUPE_BENCH_LOG names, else at `level`.
void init_log(const std::string& name, const char* level);

}  // namespace troupe::bench
