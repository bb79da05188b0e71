#pragma once

#include <string>

#include "troupe/config/reader.hpp"

/// From the tree to the structs, section by section: types, ranges, defaults, unknown keys. What
/// takes more than one section to judge is in checks.hpp.
namespace troupe::config {

/// The whole file. Where something is refused the default stands in its place, so that the rest can
/// still be read.
[[nodiscard]] deployment read_deployment(findings& into, const yaml_node& root);

[[nodiscard]] stage_config read_stage(findings& into, const yaml_node& node,
                                      const std::string& path,
                                      const std::optional<model_config>& model);
/// `layout`, with `otherwise` for the keys that are not there.
[[nodiscard]] cache_arrangement read_arrangement(section& parent,
                                                 const cache_arrangement& otherwise);

/// `transport` of a stage.
[[nodiscard]] transport_config read_transport(section& stage);

}  // namespace troupe::config
