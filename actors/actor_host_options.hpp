#pragma once

#include <chrono>
#include <cstddef>

#include "troupe/actors/door_security.hpp"

namespace troupe::actors {

/// Options of a process's actor system. Apart from `actor_host`, whose header includes CAF.
struct actor_host_options {
  std::size_t threads{2};  ///< of the scheduler that all actors of the process share
  /// CAF's own keep-alive between two processes. Without it a frozen peer is never noticed.
  std::chrono::milliseconds network_heartbeat{1000};
  /// A connection on which nothing arrived for this long is closed. Must exceed `network_heartbeat`
  /// of any peer.
  std::chrono::milliseconds connection_timeout{5000};
  /// How both ends of a connection prove that they belong to the cluster. The files named here are
  /// read when the host is made; a host whose credentials cannot be used says so with every
  /// `publish` and `connect`. Open by default; `host_options_of` (host_options.hpp) sets what the
  /// deployment says.
  door_security security{};
  /// How long `shutdown` waits for actors to end. The destruction of the host has half of it to
  /// send their last messages.
  std::chrono::milliseconds shutdown_timeout{2000};
};

}  // namespace troupe::actors
