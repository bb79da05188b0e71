#pragma once

#include <optional>
#include <vector>

#include <caf/typed_event_based_actor.hpp>

#include "troupe/actors/context/node_context.hpp"
#include "troupe/actors/messages/messages.hpp"

namespace troupe::actors {

/// One put, get, query or remove at another node. Spawned by the engine port.
///
///   state    event                       next     actions
///   -------  --------------------------  -------  -------
///   asked    reply (small, or no value)  fencing  fence, then the outcome
///   asked    store_held (put)            storing  send store_commit
///   asked    the peer does not reach     asked    ask again, with a copy of the value in memory that
///            the value (put)                      the peer reaches
///   asked    reply with a grant (get)    reading  post a read into scratch memory
///   reading  completed                   fencing  send store_release, fence, then the outcome
///   storing  reply                       fencing  send store_release, fence, then the outcome
///   storing  store_held                  storing  send store_commit again: the last one was late
///   storing  abort                       storing  none: the value may be stored by now
///   storing  link lost, deadline         fencing  fence, then the failure, which says that the
///                                                 result is unknown
///   asked,   abort, deadline             fencing  send store_release, fence, then the failure
///   reading
///   asked,   link lost                   fencing  fence, then the failure
///   reading
///   asked,   link back                   asked    ask again; a read in progress starts over, into
///   reading                                       other scratch memory
///   storing  link back                   storing  send store_commit again
///   fencing  quiescent                   -        outcome, quit
///
/// A failure is reported without waiting for the fence, which may take as long as the peer is
/// stalled, unless the peer may read the caller's memory (`lent`): the outcome returns that memory
/// to the caller. So the caller's memory is lent over wire backends only, where closing the link
/// shuts a peer out whatever it does; a peer that reaches into our memory gets a copy to read.
struct value_client_state {
  enum class phase : std::uint8_t { asked, storing, reading, fencing };

  context_ptr context;
  engine_port_actor port;
  link_handle link;
  transfer_id transfer;
  start_value order;
  phase now{phase::asked};
  bool said_again{false};               ///< `store_commit` was repeated: the first may have arrived
  bool lent{false};                     ///< put: the grant is on the caller's memory
  std::optional<region_id> registered;  ///< put: the value's region, while the grant lives
  std::optional<value_store::reservation> copy;     ///< put: a copy, while the grant lives
  std::optional<region_id> copy_apart;              ///< put: the copy's region if not in `copy`
  std::optional<grant_wish> wish;                   ///< put: on the value or its copy
  std::optional<value_store::reservation> scratch;  ///< get: the bytes
  /// Memory where reads over broken links may still land.
  std::vector<value_store::reservation> former_scratch;
  std::optional<decltype(value_concluded::outcome)> outcome;
  static inline const char* name = "value_client";
};

struct value_client_options {
  context_ptr context;
  engine_port_actor port;
  link_handle link;
  transfer_id transfer;
  start_value order;
};

/// Whether the value of a put is the caller's, and the peer would reach into our memory for it. The
/// `value_client` then copies the value as soon as it runs.
[[nodiscard]] bool must_copy(const start_value& order, const link_handle& link);

[[nodiscard]] session_actor::behavior_type value_client(
    session_actor::stateful_pointer<value_client_state> self, value_client_options options);

/// Runs one of the four operations on this node's own store, at once.
[[nodiscard]] decltype(value_concluded::outcome) value_here(node_context& context,
                                                            const start_value& order);

}  // namespace troupe::actors
