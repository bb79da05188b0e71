#pragma once

#include <string>

#include "troupe/config/reader.hpp"

/// From the tree to the structs, section by section: types, ranges, defaults, unknown keys. Checks
/// across sections are in checks.hpp.
namespace troupe::config {

/// Reads the whole file. A refused value is replaced by its default, so that the rest can still be
/// read.
[[nodiscard]] deployment read_deployment(findings& into, const yaml_node& root);

[[nodiscard]] stage_config read_stage(findings& into, const yaml_node& node,
                                      const std::string& path,
                                      const std::optional<model_config>& model);
/// Reads `layout`, with the values of `otherwise` for missing keys.
[[nodiscard]] cache_arrangement read_arrangement(section& parent,
                                                 const cache_arrangement& otherwise);

/// Reads `transport` of a stage.
[[nodiscard]] transport_config read_transport(section& stage);

}  // namespace troupe::config
