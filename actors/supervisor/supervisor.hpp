#pragma once

/// The supervisor of a cluster: the actor around `membership_table` and `router`. It owns both,
/// monitors the node actors (a closed socket is a node down at once) and counts their heartbeats (a
/// frozen process closes nothing), and tells every node of every change, at most once per
/// `broadcast_interval`. What happened it keeps in an `event_log` and logs, one line each.
///
/// A supervisor that has restarted answers the heartbeats of nodes that have not registered with it
/// with `known = false`; they register again, and it has its cluster back. With a `membership_store`
/// it goes on where the one before it ended: epochs go up, and lives that were replaced stay refused.
/// Lives that it knows from there keep `member::registered`, and are not eased in again. Affinities are
/// not kept. It has forgotten its drains, though: a node that drains says so by leaving when it registers
/// again, and goes on by itself (`node_drain.hpp`); to give it a deadline it is drained once more.

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>

#include <caf/fwd.hpp>

#include "troupe/actors/membership/membership.hpp"
#include "troupe/actors/membership/membership_store.hpp"
#include "troupe/actors/membership/router.hpp"
#include "troupe/actors/messages/messages.hpp"
#include "troupe/config/deployment.hpp"

namespace troupe::actors {

struct supervisor_options {
  membership_options members;
  router_options routes;
  std::shared_ptr<membership_store> store;  ///< what survives; null: nothing does
  /// Of the supervisor's own clock: how finely heartbeats and placement deadlines are judged.
  std::chrono::milliseconds tick{50};
  /// How many nodes live, whenever that changes, for whoever ends a supervisor that has none. Null:
  /// nobody does.
  std::shared_ptr<std::atomic<std::size_t>> nodes_there{};
  /// How often processes have asked for a name so far, for the same: they are no nodes yet. Null: nobody
  /// wants to know.
  std::shared_ptr<std::atomic<std::uint64_t>> claims_asked{};
};

/// What a deployment says of its supervisor: its slots, edges, policies, intervals and limits.
[[nodiscard]] supervisor_options supervisor_options_from(const config::deployment& deployment);

/// Starts a supervisor. It ends when it gets an exit message; requests that wait for a placement
/// get `aborted` then. `members.supervisor_incarnation` is drawn when it is 0.
[[nodiscard]] supervisor_actor spawn_supervisor(caf::actor_system& system,
                                                supervisor_options options);

}  // namespace troupe::actors
