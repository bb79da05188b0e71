#pragma once

/// Where the process of a node runs, as the node says it of itself when it registers. Whoever dials it
/// knows from that, before anything is asked, which backends cannot join the two.

#include "troupe/actors/cluster_messages.hpp"
#include "troupe/transport/types.hpp"

namespace troupe::actors {

/// The node, with that place said of it.
[[nodiscard]] node_info placed_at(node_info node, const transport::host_identity& place);
/// What a node has said; without GPUs.
[[nodiscard]] transport::host_identity place_of(const node_info& node);

}  // namespace troupe::actors
