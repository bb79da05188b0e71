#pragma once

/// Every actor interface of Troupe, one line per message saying what it is for and who sends it.
/// Read this file to understand the system. Cluster messages cross processes, all others do not.
///
/// Nodes of one cluster trust each other: a process that may send these messages may use the memory
/// that grants describe. So a cluster port is loopback-only unless `security` says otherwise.

#include <caf/replies_to.hpp>
#include <caf/typed_actor.hpp>

#include "troupe/actors/messages/local_messages.hpp"
#include "troupe/actors/messages/types.hpp"

namespace troupe::actors {

// -- between processes

/// One per node, the only published actor of its process.
using node_actor = caf::typed_actor<
    // supervisor -> node: the membership changed (coalesced, the full list)
    caf::reacts_to<members_atom, membership>,
    // supervisor -> node: your heartbeat is unknown here, register again
    caf::reacts_to<register_again_atom>,
    // supervisor -> node: an operator drains you, or you are drained: leave
    caf::reacts_to<drain_atom, drain_order>,
    // node -> node: make a link with me; the reply carries this side's offer or the refusal
    caf::replies_to<link_request>::with<link_reply>,
    // `troupe status` -> node: what do you own and do
    caf::replies_to<report_atom>::with<node_report>,
    // a frontend -> node: a small request for the engine behind it
    caf::replies_to<call_request>::with<call_reply>>;

/// One per cluster, published at the supervisor's port.
using supervisor_actor = caf::typed_actor<
    // node -> supervisor: take me in; the membership is sent to the handle
    caf::replies_to<register_atom, registration_request, node_actor>::with<registration>,
    // node -> supervisor, every heartbeat_interval
    caf::replies_to<heartbeat>::with<heartbeat_ack>,
    // node -> supervisor: I stop in good order (name, incarnation)
    caf::reacts_to<leave_atom, std::string, std::uint64_t>,
    // engine or frontend -> supervisor: choose a (prefill, decode) pair for a request
    caf::replies_to<place_atom, placement_request>::with<placement>,
    // engine or frontend -> supervisor: a placed request ended (its id), for the queue lengths
    caf::reacts_to<placed_request_ended_atom, std::string>,
    // `troupe status` -> supervisor
    caf::replies_to<members_atom>::with<membership>,
    // `troupe drain` -> supervisor: place nothing more on a node and let it leave
    caf::replies_to<drain_atom, drain_request>::with<drain_reply>,
    // `troupe node --stage` -> supervisor: which node of that stage shall I be
    caf::replies_to<lease_name_atom, name_request>::with<name_lease>,
    // `troupe events` -> supervisor: what happened since
    caf::replies_to<events_atom, event_query>::with<event_page>,
    // the supervisor's own clock
    caf::reacts_to<tick_atom>>;

// -- inside one process
// `session_actor` and `link_actor` stand in local_messages.hpp, since the messages carry their
// handles.

/// Runs every operation of the engine; one per node. Begins the sessions that work for them.
using runner_actor = caf::typed_actor<
    // engine -> runner: begin or steer an operation
    caf::reacts_to<engine_command>,
    // links, sessions, pool_manager -> runner
    caf::reacts_to<runner_event>,
    // node -> runner: news of the cluster
    caf::reacts_to<node_notice>,
    // node -> runner: what is live, for status
    caf::replies_to<report_atom>::with<transfer_reports>,
    // the runner's own clock, only while something has a deadline
    caf::reacts_to<tick_atom>>;

/// Serves the line for blocks and reclaims whatever has expired; one per node.
using pool_manager_actor = caf::typed_actor<
    // runner, cache_pool, value_server -> pool: wait in line, leave it, blocks or values changed
    caf::reacts_to<pool_command>,
    // node -> pool
    caf::replies_to<report_atom>::with<pool_report>,
    // its own clock
    caf::reacts_to<tick_atom>>;

/// The cluster side of a node beside `node_actor`: the messages that only its own process may send.
using local_node_actor = node_actor::extend<
    // runner -> node: I need a link with that node; ends as link_ready or link_gone
    caf::reacts_to<node_command>,
    // the node's own clock
    caf::reacts_to<tick_atom>>;

}  // namespace troupe::actors
