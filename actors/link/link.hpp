#pragma once

#include <cstdint>
#include <memory>

#include "troupe/actors/context/node_context.hpp"
#include "troupe/actors/messages/messages.hpp"

namespace troupe::actors {

namespace links {
class link_actor_state;
}

/// The state of a link actor, which serves a `links::peer_link`.
struct link_slot {
  std::unique_ptr<links::link_actor_state> link;

  static inline const char* name = "link";

  link_slot();
  link_slot(const link_slot&) = delete;
  link_slot& operator=(const link_slot&) = delete;
  ~link_slot();
};

struct link_options {
  context_ptr context;
  runner_actor runner;
  node_info peer;
  transport::link_role role{transport::link_role::initiator};
  std::uint64_t asked{0};  ///< `need_link::ask`; 0: the peer dialled
};

[[nodiscard]] link_actor::behavior_type link_behavior(link_actor::stateful_pointer<link_slot> self,
                                                      link_options options);

}  // namespace troupe::actors
