#pragma once

/// Two nodes and the links between them, in one thread, under virtual time. Both ends of a link are
/// the real `links::peer_link`; the transport below them, the network of the actors, the processes
/// and the transfers above them are simulated, with their failures: a transport link breaks, for
/// both ends or for one, or falls silent; a backend becomes unusable; messages between the nodes
/// are late; a process freezes, dies and returns, or leaves in good order. Each side of a transfer
/// and each port checks all that it is told; the whole is checked at the end. The same seed gives the
/// same run.

#include <chrono>
#include <cstdint>
#include <map>
#include <string>

namespace troupe::actors::link_simulation {

struct options {
  std::uint64_t seed{1};
  std::chrono::seconds faults_for{40};  ///< no fault begins after this virtual time
  double faults_per_second{1.5};
  bool traced{false};  ///< print every step
};

struct report {
  std::string violation;    ///< the first invariant that did not hold; empty if all held
  std::uint64_t digest{0};  ///< of all events, in order
  std::uint64_t events{0};
  std::uint64_t links{0};  ///< that came up
  std::uint64_t rebuilds{0};
  std::uint64_t moved{0};     ///< transfers that arrived whole
  std::uint64_t given_up{0};  ///< transfers that failed with a reason
  std::uint64_t refused{0};   ///< batches that came after a fence
  std::map<std::string, std::uint64_t> faults;
};

[[nodiscard]] report run(const options& of);

}  // namespace troupe::actors::link_simulation
