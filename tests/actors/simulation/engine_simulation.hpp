#pragma once

/// The nodes of a prefill and of a decode replica, of one or two ranks each, in one thread and
/// virtual time. The runners, the sessions, the links, the pools and the tables of all nodes are the
/// real ones. The transport below them moves real bytes, and it, the processes, the hosts and the supervisor's news fail as
/// `faulty_nodes` makes them. The engines above make random requests, know every byte that belongs
/// anywhere, and check all that they are told and all that is touched. They also put, get and remove
/// keyed values at each other. The same seed gives the same run.

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "faulty_nodes.hpp"
#include "simulated_engine.hpp"

namespace troupe::actors::engine_simulation {

struct options : link_simulation::fault_options {
  options() { faults_for = std::chrono::seconds{20}; }
  /// Of a reduced run (shrink.hpp), by side. Empty: the seed says how many.
  std::optional<std::array<std::uint32_t, 2>> ranks;
};

struct report : link_simulation::fault_report {
  engine_totals engines;
  std::uint64_t requests{0}, rebuilt{0}, parked{0};
  std::uint64_t refused{0};                       ///< batches that came after a fence
  std::uint64_t crashed{0};                       ///< sessions
  std::array<std::uint32_t, 2> ranks{};           ///< by side
  std::map<std::string, std::uint64_t> values{};  ///< how operations on them ended, and what else
};

[[nodiscard]] report run(const options& of);

[[nodiscard]] troupe::testing::shrinkable<options, report> whole();

}  // namespace troupe::actors::engine_simulation
