#pragma once

#include <functional>
#include <string>

#include "simulation.hpp"

namespace troupe::actors::cluster_simulation {

/// A reduced run that breaks the same invariant as the original one.
struct shrunk {
  options of;
  report story;  ///< of that run, with its trace
};

/// Removes faults, requests and nodes from a run that breaks an invariant for as long as the
/// reduced run still breaks the same one. A removal changes the random choices of the rest, so each
/// attempt is also made with `tries` other dice. `say` receives progress messages. If the run
/// breaks nothing, `story` has no violation.
[[nodiscard]] shrunk shrink(const options& of, std::uint32_t tries,
                            const std::function<void(const std::string&)>& say);

}  // namespace troupe::actors::cluster_simulation
