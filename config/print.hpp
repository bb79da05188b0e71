#pragma once

#include <string>

#include "troupe/config/deployment.hpp"

namespace troupe::config {

/// The deployment as YAML with every default spelt out; `parse` gives back an equal value. What
/// `troupe check` shows.
[[nodiscard]] std::string print(const deployment& of);

}  // namespace troupe::config
