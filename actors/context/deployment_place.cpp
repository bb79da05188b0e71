#include "troupe/actors/context/deployment_place.hpp"

#include "troupe/config/open_name.hpp"

namespace troupe::actors {

std::optional<node_place> deployment_place(const node_settings& settings, const std::string& name) {
  const auto found = settings.nodes.find(name);
  if (found != settings.nodes.end()) return found->second;
  auto open = config::open_place_of(name);
  if (!open || !settings.open_stages.contains(open->stage)) return std::nullopt;
  return node_place{std::move(open->stage), 0, open->rank, 0, std::move(open->replica)};
}

bool same_replica(const node_place& one, const node_place& other) {
  return one.stage == other.stage && one.replica == other.replica &&
         one.replica_name == other.replica_name;
}

}  // namespace troupe::actors
