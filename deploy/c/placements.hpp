#pragma once

#include <span>
#include <vector>

#include "troupe/actors/cluster_messages.hpp"
#include "troupe/kvcache/result.hpp"
#include "troupe/troupe.h"

namespace troupe::c {

[[nodiscard]] result<actors::placement_request> placement_request_of(
    const troupe_placement_request* given);

/// Labels as C sees them. Their texts belong to `labels`.
[[nodiscard]] std::vector<troupe_label> labels_of(const std::vector<actors::node_label>& labels);
/// The same, added to `out`.
void add_labels(const std::vector<actors::node_label>& labels, std::vector<troupe_label>& out);
/// The labels of a node. Their texts belong to `node`.
[[nodiscard]] std::vector<troupe_label> labels_of(const actors::node_info& node);
/// A node as C sees it. Its texts belong to `node`, its labels are `labels`.
[[nodiscard]] troupe_node_info node_of(const actors::node_info& node,
                                       std::span<const troupe_label> labels) noexcept;

}  // namespace troupe::c
