#pragma once

#include <vector>

#include "troupe/actors/link/backend_reports.hpp"
#include "troupe/kvcache/result.hpp"

namespace troupe::deploy::cli {

/// What this machine can move bytes with. Makes an endpoint for it, without threads.
[[nodiscard]] result<std::vector<actors::backend_report>> backends_here();

}  // namespace troupe::deploy::cli
