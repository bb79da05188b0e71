#pragma once

#include <vector>

#include "troupe/actors/link/backend_reports.hpp"
#include "troupe/kvcache/result.hpp"

namespace troupe::deploy::cli {

/// The backends that this machine can use. Makes a temporary endpoint without threads.
[[nodiscard]] result<std::vector<actors::backend_report>> backends_here();

}  // namespace troupe::deploy::cli
