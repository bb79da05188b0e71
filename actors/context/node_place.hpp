#pragma once

/// Where the process of a node runs, as the node reports it when it registers. Tells a dialler in
/// advance which backends cannot join the two nodes.

#include "troupe/actors/cluster_messages.hpp"
#include "troupe/transport/types.hpp"

namespace troupe::actors {

/// The node, with that place filled in.
[[nodiscard]] node_info placed_at(node_info node, const transport::host_identity& place);
/// The place that a node reported; without GPUs.
[[nodiscard]] transport::host_identity place_of(const node_info& node);

}  // namespace troupe::actors
