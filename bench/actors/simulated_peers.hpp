#pragma once

/// Nodes without an engine: they do what a supervisor sees of a node, with the real messages over
/// real connections. CAF makes one connection between two processes, however many actors speak over
/// it, so the nodes of one process share theirs.

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
  std::uint64_t lists{0};     ///< received so far
  std::uint64_t entries{0};   ///< in them
};

/// The main function of a process: runs these slots of the deployment as nodes until the parent is
/// gone. Answers everything that the parent writes with a `peer_count`.
void simulate_peers(const std::string& cluster, const std::vector<actors::expected_slot>& slots,
                    std::size_t of, std::uint16_t supervisor_port,
                    std::chrono::milliseconds interval, const control& parent);

/// The smallest possible supervisor: it registers every node and acknowledges every heartbeat, and
/// does nothing else. Measures the cost of CAF's messages.
[[nodiscard]] actors::supervisor_actor spawn_bare_supervisor(caf::actor_system& system,
                                                             std::chrono::milliseconds interval);

}  // namespace troupe::bench
