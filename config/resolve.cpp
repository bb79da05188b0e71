#include "troupe/config/resolve.hpp"

#include <algorithm>

#include "troupe/config/automatic_host.hpp"

namespace troupe::config {

const std::string& host_of(const stage_config& stage, std::uint32_t replica,
                           std::uint32_t rank) noexcept {
  const std::size_t hosts = stage.hosts.size();
  if (hosts > stage.replicas) {
    return stage.hosts[(std::size_t{replica} * stage.ranks() + rank) % hosts];
  }
  return stage.hosts[replica % hosts];
}

std::string node_name(const stage_config& stage, std::uint32_t replica, std::uint32_t rank) {
  // A stage's name may hold dashes and digits; the name of its nodes still splits in one way only,
  // because the last piece of it is digits without ranks, and `pp`, `tp` or both in that order with them.
  std::string name = stage.name + "-" + std::to_string(replica);
  if (stage.pipeline_parallel > 1) name += "-pp" + std::to_string(rank / stage.tensor_parallel);
  if (stage.tensor_parallel > 1) name += "-tp" + std::to_string(rank % stage.tensor_parallel);
  return name;
}

std::vector<resolved_node> resolve(const deployment& of, const std::set<std::string>& here) {
  const auto is_local = [&here](const std::string& host) {
    return is_loopback(host) || is_automatic(host) || here.contains(canonical_host(host));
  };
  std::vector<resolved_node> nodes;
  resolved_node supervisor;
  supervisor.name = "supervisor";
  supervisor.host = of.supervisor.host;
  supervisor.port = of.supervisor.port;
  supervisor.local = is_local(supervisor.host);
  nodes.push_back(std::move(supervisor));

  for (std::size_t index = 0; index < of.stages.size(); ++index) {
    const auto& stage = of.stages[index];
    if (stage.open) continue;  // no file names its nodes
    for (std::uint32_t replica = 0; replica < stage.replicas; ++replica) {
      for (std::uint32_t rank = 0; rank < stage.ranks(); ++rank) {
        const std::size_t slot = std::size_t{replica} * stage.ranks() + rank;
        resolved_node node;
        node.name = node_name(stage, replica, rank);
        node.role = stage.role;
        node.stage = stage.name;
        node.stage_index = index;
        node.replica = replica;
        node.rank = rank;
        node.tensor_parallel = stage.tensor_parallel;
        node.pipeline_parallel = stage.pipeline_parallel;
        node.host = host_of(stage, replica, rank);
        node.port = slot < stage.ports.size() ? stage.ports[slot] : std::uint16_t{0};
        node.engine = stage.engine;
        node.local = is_local(node.host);
        nodes.push_back(std::move(node));
      }
    }
  }
  return nodes;
}

const resolved_node* find_node(const std::vector<resolved_node>& nodes,
                               std::string_view name) noexcept {
  const auto found = std::find_if(nodes.begin(), nodes.end(),
                                  [&](const resolved_node& node) { return node.name == name; });
  return found == nodes.end() ? nullptr : &*found;
}

}  // namespace troupe::config
