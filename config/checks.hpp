#pragma once

#include "troupe/config/reader.hpp"

/// What takes more than one key to judge. A check is silent where a value that it needs was
/// refused.
namespace troupe::config {

/// Also gives each edge that moves layers its mode, which only the stages decide.
void check_deployment(findings& into, deployment& value);

/// Names, placement, ports, engines, pools and layouts of the stages.
void check_stages(findings& into, const deployment& value);

}  // namespace troupe::config
