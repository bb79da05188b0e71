#pragma once

/// The actions that the state machines of a transfer ask their actor to take. The machines contain
/// no actor, clock or link: time and events come in as arguments, actions come out, in order.
///
/// How an actor carries them out:
/// - A list is carried out to its end before the next event goes in. An event that arises meanwhile
///   waits until then: a post that is refused at once is a `batch_completed` with that failure. The
///   one exception is `quiescent()`, which may be called at once, since `fence_transfer` is the
///   last action of its list.
/// - An action that cannot be carried out is an event: `batch_completed(id, failure)` for a post,
///   `local_abort(why)` for a `send_offer` or a message. The machines take events in every state.
/// - A batch that failed because its link broke is better reported as `link_lost(why)`: the link's
///   owner knows whether the peer is gone, and the first failure is the outcome.

#include <optional>
#include <variant>
#include <vector>

#include "troupe/actors/base/clock.hpp"
#include "troupe/actors/messages/session_messages.hpp"
#include "troupe/transport/backend.hpp"

namespace troupe::actors {

/// Post one batch: push these layers (prefill, write mode; with a `layers_landed` frame behind the
/// bytes) or pull them (decode, read mode). Ends as `batch_completed(id, ...)`. The slice is empty
/// (no layer, no token) when only the state tensors are left to move.
struct post_slice {
  transport::batch_id id;  ///< 1, 2, ... within the transfer; the actor makes it unique on the link
  cache_slice slice;
  bool state{false};                ///< the per-request state tensors go with it
  std::optional<seal_notice> seal;  ///< travels with the notice of this batch, the last one
};
/// Send this to the other side.
struct send_message {
  session_message message;
};
/// Give grants on the source blocks of `slice` and send `transfer_offer` (prefill, read mode).
struct send_offer {
  cache_slice slice;           ///< never empty
  bool state{false};           ///< also give grants on the state tensors
  std::vector<std::byte> aux;  ///< for the offer
};
/// Fence the transfer on its link; ends as `quiescent()`. Always the last action of its list.
struct fence_transfer {};
/// Tell the engine that these layers have arrived (decode). Slices of a layer are told in the order
/// of their tokens, each token once: the layer is then complete from the request's first token up
/// to `token_end`.
struct tell_layers {
  cache_slice slice;
};
/// The one outcome of this side: empty is done.
struct conclude {
  std::optional<troupe::error> failure;
  std::vector<std::byte> aux;  ///< decode, done: what came with the seal or the offer
  bool refused{false};         ///< on failure: the request was refused (`transfer_abort::refused`)
};
/// Nothing of this transfer can touch local memory any more: drop its pins. Last action of a
/// machine.
struct unpin {};

using session_action = std::variant<post_slice, send_message, send_offer, fence_transfer,
                                    tell_layers, conclude, unpin>;
using session_actions = std::vector<session_action>;

}  // namespace troupe::actors
