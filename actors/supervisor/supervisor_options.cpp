#include <algorithm>

#include "troupe/actors/messages/node_roles.hpp"
#include "troupe/actors/runtime/system.hpp"
#include "troupe/actors/supervisor/supervisor.hpp"
#include "troupe/config/resolve.hpp"

namespace troupe::actors {

namespace {

placement_policy policy_of(config::placement_policy policy) noexcept {
  switch (policy) {
    case config::placement_policy::random: return placement_policy::random;
    case config::placement_policy::round_robin: return placement_policy::round_robin;
    case config::placement_policy::least_queue_length: return placement_policy::least_queue_length;
  }
  return placement_policy::round_robin;
}

}  // namespace

supervisor_options supervisor_options_from(const config::deployment& deployment) {
  supervisor_options out;
  out.members.cluster = deployment.cluster;
  out.members.heartbeat_interval = deployment.supervisor.heartbeat_interval;
  out.members.heartbeat_timeout = deployment.supervisor.heartbeat_timeout;
  out.members.stall_tolerance = deployment.supervisor.heartbeat_interval;
  for (const config::resolved_node& node : config::resolve(deployment, {})) {
    if (node.role == config::role::supervisor) continue;
    out.members.slots.push_back({node.name, node.stage, node_role_of(node.role), node.replica,
                                 node.rank, node.ranks(), node.host});
  }
  for (const config::stage_config& stage : deployment.stages) {
    out.routes.policies[stage.name] = policy_of(stage.policy);
    if (!stage.open) continue;
    out.members.open.push_back({stage.name, node_role_of(stage.role), stage.open->max_nodes});
    out.routes.open.insert(stage.name);
  }
  for (const config::edge_config& edge : deployment.edges) {
    out.routes.edges.push_back({edge.from, edge.to, edge.mode});
  }
  out.routes.max_waiting = deployment.limits.max_waiting;
  out.routes.retry_budget = deployment.limits.retry_budget;
  out.routes.ease_in = deployment.supervisor.ease_in;
  out.routes.seed = draw_incarnation();
  // A twentieth of the heartbeat interval, bounded to avoid a busy loop and coarse broadcasts.
  using std::chrono::milliseconds;
  out.tick =
      std::clamp(deployment.supervisor.heartbeat_interval / 20, milliseconds{5}, milliseconds{50});
  return out;
}

}  // namespace troupe::actors
