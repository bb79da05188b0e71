#pragma once

#include <functional>
#include <string>

#include "simulation.hpp"

namespace troupe::actors::cluster_simulation {

/// A run that breaks the same invariant as another one, with as little as was found to be enough.
struct shrunk {
  options of;
  report story;  ///< of that run, traced
};

/// Leaves out faults, requests and nodes of a run that breaks an invariant for as long as what is left
/// still breaks that one. What is left out changes what chance does to the rest, so each attempt is
/// made with `tries` other dice too. `say` hears how far it is. Of a run that breaks nothing the
/// story has no violation.
[[nodiscard]] shrunk shrink(const options& of, std::uint32_t tries,
                            const std::function<void(const std::string&)>& say);

}  // namespace troupe::actors::cluster_simulation
