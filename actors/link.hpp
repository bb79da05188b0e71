#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <caf/typed_event_based_actor.hpp>

#include "troupe/actors/messages.hpp"
#include "troupe/actors/node_context.hpp"

namespace troupe::actors {

/// Owns one connection to one incarnation of a peer: makes it (the dialling side also reaches the
/// peer's node actor and falls back from one backend to the next), routes what arrives to the actor
/// of its transfer, and ends it.
///
///   state       event                        next        what happens
///   ----------  ---------------------------  ----------  ------------
///   dialling    peer's reply with an offer   connecting  transport link connects
///   dialling    refusal, error, time out     dialling    again after a pause, `max_reconnects`
///   connecting                                           times; then the next backend, visibly
///                                            ending      none left, or a final refusal: link_gone
///   connecting  transport is up              up          link_ready to the port
///   up          transport broke, close_link  ending      link_is_lost to its sessions, link_gone
///   ending      last session detached        ended       the actor quits
///
/// Sessions live on after the link is lost until their fences hold; so does the transport link.
struct link_state {
  enum class phase : std::uint8_t { dialling, connecting, up, ending };

  context_ptr context;
  engine_port_actor port;
  node_info peer;
  transport::link_role role{transport::link_role::initiator};
  phase now{phase::dialling};
  std::shared_ptr<transport::link> link;
  std::uint64_t generation{0};
  transport::backend_choice choice;
  std::vector<transport::backend_kind> failed;  ///< backends that were given up
  std::uint32_t attempts{0};                    ///< with the present backend
  time_point dial_until;                        ///< no later attempt to reach the peer's node
  std::chrono::milliseconds dial_pause{20};     ///< before the next one
  std::shared_ptr<const kvcache::cache_layout> peer_layout;
  node_actor peer_node;
  std::unordered_map<transfer_id, session_actor> sessions;
  std::unordered_map<std::uint64_t, transport::batch_id> batches;  ///< ours -> the session's
  std::uint64_t next_batch{1};
  std::string why_ended;
  std::optional<troupe::error> lost;  ///< what its sessions are told once it has ended

  static inline const char* name = "link";
};

struct link_options {
  context_ptr context;
  engine_port_actor port;
  node_info peer;
  transport::link_role role{transport::link_role::initiator};
};

[[nodiscard]] link_actor::behavior_type link_behavior(link_actor::stateful_pointer<link_state> self,
                                                      link_options options);

}  // namespace troupe::actors
