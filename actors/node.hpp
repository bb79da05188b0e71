#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <caf/typed_event_based_actor.hpp>
#include <caf/typed_response_promise.hpp>

#include "troupe/actors/messages.hpp"
#include "troupe/actors/node_context.hpp"

namespace troupe::actors {

/// The cluster side of a node: registers, beats, keeps the last membership, makes links on demand,
/// takes links and calls in. The one published actor of its process. Waits for its first tick,
/// which comes when the port is bound, before it registers.
///
///   state         event                           next          what happens
///   ------------  ------------------------------  ------------  ------------
///   unregistered  supervisor reached and accepts  registered    heartbeats begin
///   unregistered  unreachable, refused            unregistered  tries again with each beat
///   registered    heartbeat unknown, rejoin       unregistered  registers again, links stay
///   registered    supervisor gone                 unregistered  keeps its membership and its links
///   any           stop_node                       -             leaves, closes links, quits
struct node_state_data {
  struct known_link {
    std::string peer;
    std::uint64_t incarnation{0};
    link_actor actor;
    bool dialled{false};
  };

  context_ptr context;
  engine_port_actor port;
  pool_manager_actor pool;
  supervisor_actor supervisor;
  bool registered{false};
  bool registering{false};
  std::string refusal;  ///< the last reason for not being registered
  membership members;
  std::unordered_map<caf::actor_id, known_link> links;
  /// Peers that the port needs and no membership has shown yet, and since when.
  std::vector<std::pair<std::string, std::chrono::steady_clock::time_point>> wanted;
  std::unordered_map<std::uint64_t, caf::typed_response_promise<call_reply>> calls;
  std::uint64_t next_call{1};
  std::set<operation_id> placements;  ///< that the supervisor has not answered
  std::uint64_t beats{0};
  static inline const char* name = "node";
};

/// Bound on calls of frontends that the engine has not answered.
inline constexpr std::size_t max_pending_calls = 4096;

[[nodiscard]] local_node_actor::behavior_type node(
    local_node_actor::stateful_pointer<node_state_data> self, context_ptr context,
    engine_port_actor port, pool_manager_actor pool);

}  // namespace troupe::actors
