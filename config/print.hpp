#pragma once

#include <string>

#include "troupe/config/deployment.hpp"

namespace troupe::config {

/// The deployment as YAML with every default spelt out; `parse` returns an equal value. Shown by
/// `troupe check`.
[[nodiscard]] std::string print(const deployment& of);

}  // namespace troupe::config
