#pragma once

#include <cstddef>
#include <memory>

#include "troupe/actors/context/node_context.hpp"
#include "troupe/actors/messages/messages.hpp"
#include "troupe/actors/operations/node_drain.hpp"

namespace troupe::actors {

namespace nodes {
class node_core;
}

/// State of a node's actor; everything is in `nodes::node_core`.
struct node_slot {
  std::unique_ptr<nodes::node_core> core;

  static inline const char* name = "node";

  node_slot();
  node_slot(const node_slot&) = delete;
  node_slot& operator=(const node_slot&) = delete;
  ~node_slot();
};

/// Bound on ended placed requests that wait to be told to a supervisor; the oldest is dropped.
inline constexpr std::size_t max_untold = 65536;
/// Bound on calls of frontends that the engine has not answered.
inline constexpr std::size_t max_pending_calls = 4096;

[[nodiscard]] local_node_actor::behavior_type node(
    local_node_actor::stateful_pointer<node_slot> self, context_ptr context, runner_actor runner,
    pool_manager_actor pool, node_drain_ptr drain);

}  // namespace troupe::actors
