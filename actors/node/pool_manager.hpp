#pragma once

#include <optional>

#include <caf/typed_event_based_actor.hpp>

#include "troupe/actors/context/node_context.hpp"
#include "troupe/actors/messages/messages.hpp"
#include "troupe/actors/operations/block_line.hpp"

namespace troupe::actors {

/// Serves the line for blocks in the order of arrival, ends waits whose deadline passed, and
/// reclaims keyed values whose time to live is over. Its clock runs only while something waits.
struct pool_manager_state {
  context_ptr context;
  runner_actor runner;
  std::optional<block_line> line;
  bool ticking{false};
  static inline const char* name = "pool_manager";
};

[[nodiscard]] pool_manager_actor::behavior_type pool_manager(
    pool_manager_actor::stateful_pointer<pool_manager_state> self, context_ptr context,
    runner_actor runner);

}  // namespace troupe::actors
