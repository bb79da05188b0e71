#pragma once

/// Two nodes and the links between them, in one thread, under virtual time. Both ends of a link are
/// the real `links::peer_link`; the transport below them, the network of the actors, the processes
/// and the transfers above them are simulated, with their failures: a transport link breaks, for
/// both ends or for one, or falls silent; a backend becomes unusable; messages between the nodes
/// are late; a process freezes, dies and returns, or leaves in good order. Each side of a transfer
/// and each runner checks all that it is told; the whole is checked at the end. The same seed gives the
/// same run.

#include <cstdint>

#include "faulty_nodes.hpp"

namespace troupe::actors::link_simulation {

struct options : fault_options {};

struct report : fault_report {
  std::uint64_t links{0};  ///< that came up
  std::uint64_t rebuilds{0};
  std::uint64_t moved{0};     ///< transfers that arrived whole
  std::uint64_t given_up{0};  ///< transfers that failed with a reason
  std::uint64_t refused{0};   ///< batches that came after a fence
};

[[nodiscard]] report run(const options& of);

[[nodiscard]] inline troupe::testing::shrinkable<options, report> whole() {
  return of_nodes(run, "transfers");
}

}  // namespace troupe::actors::link_simulation
