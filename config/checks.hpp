#pragma once

#include "troupe/config/reader.hpp"

/// Checks that involve more than one key. A check is skipped if a value that it needs was refused.
namespace troupe::config {

/// Also sets the mode of each edge that moves layers, which depends on the stages.
void check_deployment(findings& into, deployment& value);

/// Names, placement, ports, engines, pools and layouts of the stages.
void check_stages(findings& into, const deployment& value);

}  // namespace troupe::config
