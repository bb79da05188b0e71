#pragma once

/// The place of each node in its cluster: for nodes of the file as the file says, for nodes of open
/// stages from their names. Only the membership knows whether a node of an open stage exists.

#include <optional>
#include <string>

#include "troupe/actors/context/node_context.hpp"

namespace troupe::actors {

/// Empty if the deployment has neither such a node nor an open stage that it could be of.
[[nodiscard]] std::optional<node_place> deployment_place(const node_settings& settings,
                                                         const std::string& name);
[[nodiscard]] bool same_replica(const node_place& one, const node_place& other);

}  // namespace troupe::actors
