#pragma once

#include <memory>

#include "troupe/actors/context/node_context.hpp"
#include "troupe/actors/messages/messages.hpp"

namespace troupe::actors {

namespace operations {
class runner_actor_state;
}

/// The state of the runner's actor, which serves an `operations::operation_runner`.
struct runner_slot {
  std::unique_ptr<operations::runner_actor_state> runner;

  static inline const char* name = "runner";

  runner_slot();
  runner_slot(const runner_slot&) = delete;
  runner_slot& operator=(const runner_slot&) = delete;
  ~runner_slot();
};

[[nodiscard]] runner_actor::behavior_type runner_behavior(
    runner_actor::stateful_pointer<runner_slot> self, context_ptr context);

}  // namespace troupe::actors
