#pragma once

/// Where the nodes of a cluster stand: those of the file as it says, those of open stages as their names
/// do. Whether one of these is there only the membership knows.

#include <optional>
#include <string>
#include <string_view>

#include "troupe/actors/context/node_context.hpp"

namespace troupe::actors {

/// Empty: the deployment has no such node, nor an open stage that it could be of.
[[nodiscard]] std::optional<node_place> deployment_place(const node_settings& settings,
                                                         const std::string& name);
[[nodiscard]] bool same_replica(const node_place& one, const node_place& other);

}  // namespace troupe::actors
