#pragma once

/// Actors that end by a defect of ours: an exception in a handler, or an exit that another actor
/// forced.

#include <functional>

#include <caf/error.hpp>
#include <caf/fwd.hpp>

namespace troupe::actors {

/// Whether an actor with this exit reason ended neither by itself nor by a `shutdown`.
[[nodiscard]] bool crashed(const caf::error& reason);

/// Calls `then` when `actor` crashes, on the thread on which the actor ends.
void on_crash(const caf::strong_actor_ptr& actor, std::function<void()> then);

}  // namespace troupe::actors
