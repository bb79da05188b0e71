#pragma once

/// Reports of nodes and of the supervisor as JSON: the keys that `troupe status --json`, `troupe
/// events --json` and the C ABI share.

#include <cstdint>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "troupe/actors/cluster_messages.hpp"
#include "troupe/kvcache/layout_fingerprint.hpp"

namespace troupe::deploy {

/// Incarnations and transfers are 64-bit numbers, which many JSON readers round. They are written
/// as text, as in the logs.
[[nodiscard]] std::string hex(std::uint64_t id);
[[nodiscard]] std::string hex(const kvcache::layout_fingerprint& of);
/// Names come from the network and may not be UTF-8: invalid bytes are replaced. `indent` -1: one
/// line.
[[nodiscard]] std::string text_of(const nlohmann::json& document, int indent);

[[nodiscard]] nlohmann::json to_json(const std::vector<actors::backend_report>& backends);
/// Name, stage, role and place in its replica; for a node of an open stage also what it announced.
[[nodiscard]] nlohmann::json to_json(const actors::node_info& node);
/// Adds host, port, process and incarnation.
void add_address(nlohmann::json& out, const actors::node_info& node);
[[nodiscard]] nlohmann::json to_json(const actors::member& member);
/// Adds all of a report except the node's identity.
void add_report(nlohmann::json& out, const actors::node_report& report);
[[nodiscard]] nlohmann::json to_json(const actors::node_report& report);
[[nodiscard]] nlohmann::json to_json(const actors::membership& members);
[[nodiscard]] nlohmann::json to_json(const actors::cluster_event& event,
                                     std::uint64_t supervisor_incarnation);
[[nodiscard]] nlohmann::json to_json(const actors::event_page& page);

}  // namespace troupe::deploy
