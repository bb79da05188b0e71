#pragma once

/// Ends a node after a defect of ours.

#include <string>
#include <string_view>
#include <utility>

#include <caf/actor_cast.hpp>
#include <caf/fwd.hpp>

#include "troupe/actors/context/node_context.hpp"

namespace troupe::actors {

/// Ends the node: every live operation fails with `internal`, none begins any more, and waits for
/// the registration end for good with that error, so that the process can end and be started again.
/// `what_happened` is the beginning of a sentence. Any thread. Also works if memory is short, which
/// may be what happened.
void end_node(node_context& context, std::string_view what_happened) noexcept;

/// The error of a node that ends: the sentence is `what` and `then`. Just `out of memory` if there is
/// none for the sentence.
[[nodiscard]] troupe::error why_ended(errc code, std::string_view what,
                                      std::string_view then = {}) noexcept;

/// The runner, the pool manager and the node's actor hold the state of the engine's operations;
/// none of them can be replaced without losing those. If `actor` crashes, ends the node (`end_node`).
/// `what` names the actor in messages. Any thread.
void watch_essential(const context_ptr& context, const caf::strong_actor_ptr& actor,
                     std::string what);

/// Same for the network of the process, without which the node reaches nobody.
void watch_network(const context_ptr& context, caf::actor_system& system);

template <class Handle>
void watch_essential(const context_ptr& context, const Handle& actor, std::string what) {
  watch_essential(context, caf::actor_cast<caf::strong_actor_ptr>(actor), std::move(what));
}

}  // namespace troupe::actors
