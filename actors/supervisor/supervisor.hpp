#pragma once

/// The supervisor of a cluster: the actor around `membership_table` and `router`. It owns both,
/// monitors the node actors (a closed socket is a node down at once) and counts their heartbeats (a
/// frozen process closes nothing), and tells every node of every change, at most once per
/// `broadcast_interval`. Events are kept in an `event_log` and logged, one line each.
///
/// A restarted supervisor answers the heartbeats of nodes that have not registered with it with
/// `known = false`; they register again, and it has its cluster back. With a `membership_store` it
/// goes on where the previous supervisor ended: epochs go up, and replaced lives stay refused.
/// Lives in the store keep `member::registered`, and are not eased in again. Affinities and drains
/// are not kept. A node that drains says so by leaving when it registers again, and goes on by
/// itself (`node_drain.hpp`); to give it a deadline, drain it once more.

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
  std::shared_ptr<membership_store> store;  ///< what survives the supervisor; null: nothing does
  /// Period of the supervisor's own clock, which judges heartbeats and placement deadlines.
  std::chrono::milliseconds tick{50};
  /// Kept at the number of live nodes, for code that ends a supervisor without nodes. May be null.
  std::shared_ptr<std::atomic<std::size_t>> nodes_there{};
  /// Counts the claims of names, for the same code: claimants are not nodes yet. May be null.
  std::shared_ptr<std::atomic<std::uint64_t>> claims_asked{};
};

/// The options of a deployment's supervisor: its slots, edges, policies, intervals and limits.
[[nodiscard]] supervisor_options supervisor_options_from(const config::deployment& deployment);

/// Starts a supervisor. It ends when it gets an exit message; requests that wait for a placement
/// then get `aborted`. `members.supervisor_incarnation` is drawn if it is 0.
[[nodiscard]] supervisor_actor spawn_supervisor(caf::actor_system& system,
                                                supervisor_options options);

}  // namespace troupe::actors
