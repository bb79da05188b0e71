#pragma once

/// Nodes without an engine: of the cluster side of a node they do what a supervisor sees of it, with the real
/// messages over real connections. CAF makes one connection between two processes however many
/// actors speak over it, so that the nodes of one process share theirs.

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "troupe/actors/messages/messages.hpp"
#include "troupe/actors/supervisor/supervisor.hpp"

#include "processes.hpp"

namespace troupe::bench {

struct peer_count {
  std::uint64_t registered{0};
  std::uint64_t informed{
      0};  ///< have a list, of the supervisor's present life, in which all are up
  std::uint64_t answered{0};  ///< heartbeats so far
  std::uint64_t lists{0};     ///< that came, so far
  std::uint64_t entries{0};   ///< in them
};

/// What runs in a process of its own: these slots of the deployment as nodes, until the parent is
/// gone. Whatever the parent writes is answered with a `peer_count`.
void simulate_peers(const std::string& cluster, const std::vector<actors::expected_slot>& slots,
                    std::size_t of, std::uint16_t supervisor_port,
                    std::chrono::milliseconds interval, const control& parent);

/// The least that could answer them: it takes everybody in and knows everybody's heartbeat, and does
/// nothing else. What CAF's messages cost.
[[nodiscard]] actors::supervisor_actor spawn_bare_supervisor(caf::actor_system& system,
                                                             std::chrono::milliseconds interval);

}  // namespace troupe::bench
