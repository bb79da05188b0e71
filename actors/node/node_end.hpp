#pragma once

/// The end of a node by a defect of ours.

#include <string>
#include <utility>

#include <caf/actor_cast.hpp>
#include <caf/fwd.hpp>

#include "troupe/actors/context/node_context.hpp"

namespace troupe::actors {

/// The node is over: every operation that is live fails with `internal`, none begins any more, and
/// whoever waits for the registration is told so for good, so that the process can end and be started
/// again. `what_happened` is the beginning of a sentence. Any thread.
void end_node(node_context& context, const std::string& what_happened);

/// The port, the pool manager and the node's actor hold what the operations of the engine are; none
/// of them can be replaced without losing those: where `actor` crashes the node is over (`end_node`).
/// `what` names the actor in sentences. Any thread.
void watch_essential(const context_ptr& context, const caf::strong_actor_ptr& actor,
                     std::string what);

template <class Handle>
void watch_essential(const context_ptr& context, const Handle& actor, std::string what) {
  watch_essential(context, caf::actor_cast<caf::strong_actor_ptr>(actor), std::move(what));
}

}  // namespace troupe::actors
