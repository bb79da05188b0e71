#pragma once

#include "troupe/actors/cluster_messages.hpp"
#include "troupe/kvcache/result.hpp"
#include "troupe/troupe.h"

namespace troupe::c {

[[nodiscard]] result<actors::placement_request> placement_request_of(
    const troupe_placement_request* given);

/// As C sees a node. Its texts are those of `node`.
[[nodiscard]] troupe_node_info node_of(const actors::node_info& node) noexcept;

}  // namespace troupe::c
