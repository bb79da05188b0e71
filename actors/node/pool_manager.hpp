#pragma once

#include <unordered_map>

#include <caf/typed_event_based_actor.hpp>

#include "troupe/actors/context/node_context.hpp"
#include "troupe/actors/messages/messages.hpp"

namespace troupe::actors {

/// Serves the line for blocks in the order of arrival, ends waits whose deadline passed, and
/// reclaims keyed values whose time to live is over. Its clock runs only while something waits.
struct pool_manager_state {
  context_ptr context;
  runner_actor runner;
  std::unordered_map<kvcache::waiter_id, operation_id> waiters;
  std::unordered_map<operation_id, kvcache::waiter_id> by_operation;
  bool ticking{false};
  static inline const char* name = "pool_manager";
};

[[nodiscard]] pool_manager_actor::behavior_type pool_manager(
    pool_manager_actor::stateful_pointer<pool_manager_state> self, context_ptr context,
    runner_actor runner);

}  // namespace troupe::actors
