#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <vector>

#include <caf/typed_event_based_actor.hpp>

#include "troupe/actors/context/node_context.hpp"
#include "troupe/actors/messages/messages.hpp"

namespace troupe::actors {

/// The reply to a peer's operation on our keyed values if one frame is enough for it. Otherwise
/// empty, and a `value_server` must handle the operation.
[[nodiscard]] std::optional<session_message> answer_value(node_context& context,
                                                          session_message& message);

/// The answer to an operation that is refused.
[[nodiscard]] store_reply refused_value(std::uint64_t op, const troupe::error& why);

/// Serves one put (takes the value, or reads it from the peer, and stores it when the peer says so)
/// or one large get (keeps the value pinned while the peer reads it). A live reader may take its
/// time; a reader that is gone loses its link, and with it the pin. Once the link is made again, the
/// peer asks again, with the same operation.
///
///   state    event                      next     actions
///   -------  -------------------------  -------  -------
///   reading  the put has arrived        held     send store_held
///   held     store_commit               stored   commit, send the reply; fencing if it is refused
///   held     store_commit, but late     held     send store_held again, once
///   held     store_put, link was back   held     send store_held again
///   stored   store_commit, link was     stored   send the reply again
///            back
///   any      store_release or an abort, fencing  fence; a value that is not stored is dropped
///            link lost
///   fencing  quiescent                  -        send the refusal, if any, and quit
struct value_server_state {
  enum class phase : std::uint8_t { reading, held, stored, lending, fencing };

  context_ptr context;
  engine_port_actor port;
  caf::typed_actor<caf::reacts_to<pool_command>> pool;
  link_handle link;
  transfer_id transfer;
  phase now{phase::fencing};
  std::optional<value_store::reservation> room;  ///< of a put
  std::string key;                               ///< of a put
  std::uint64_t read_over{0};                    ///< the link epoch of the read in progress
  bool read_again{false};  ///< read again over a new link: the first read may still write
  std::chrono::steady_clock::time_point said_held;
  bool asked_again{false};  ///< `store_held` was repeated because `store_commit` was late
  /// For a get, the pins of the value: one more each time it is asked for over a new link, because
  /// the value granted over the former link must stay in place. For a put that was read again, its
  /// value's.
  std::vector<std::shared_ptr<const void>> pins;
  std::optional<store_reply> reply;  ///< to send once quiescent
  static inline const char* name = "value_server";
};

struct value_server_options {
  context_ptr context;
  engine_port_actor port;
  caf::typed_actor<caf::reacts_to<pool_command>> pool;
  link_handle link;
  session_message message;  ///< a store_put or store_get that `answer_value` did not answer
};

[[nodiscard]] session_actor::behavior_type value_server(
    session_actor::stateful_pointer<value_server_state> self, value_server_options options);

}  // namespace troupe::actors
