#pragma once

#include <optional>
#include <string>

#include "troupe/config/deployment.hpp"

namespace troupe::deploy::cli {

/// Reads and checks a deployment. Empty if it is invalid: all issues have been written to standard
/// error, and the verb ends with `exit_code::usage`.
[[nodiscard]] std::optional<config::deployment> load_or_complain(const std::string& path);

}  // namespace troupe::deploy::cli
