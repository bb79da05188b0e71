#pragma once

#include <chrono>
#include <cstddef>

#include "troupe/actors/door_security.hpp"

namespace troupe::actors {

/// What the actor system of a process is made with. Apart from `actor_host`, whose header shows CAF.
struct actor_host_options {
  std::size_t threads{2};  ///< of the scheduler that all actors of the process share
  /// CAF's own keep-alive between two processes. Without it a frozen peer is never noticed.
  std::chrono::milliseconds network_heartbeat{1000};
  /// A connection is closed when nothing came over it for so long. More than `network_heartbeat` of
  /// any peer.
  std::chrono::milliseconds connection_timeout{5000};
  /// How who connects, and who is connected to, prove that they belong to the cluster. The files
  /// that it names are read when the host is made; a host whose credentials cannot be used says so
  /// with every `publish` and `connect`. Open unless set: what a deployment says comes with
  /// `host_options_of` (host_options.hpp).
  door_security security{};
  /// How long `shutdown` waits for actors to end before it stops waiting for them. The end of the host has
  /// half of it to send what they said last.
  std::chrono::milliseconds shutdown_timeout{2000};
};

}  // namespace troupe::actors
