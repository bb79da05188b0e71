#pragma once

/// What the state machines of a transfer ask their actor to do. The machines have no actor, no
/// clock and no link in them: time and events come in as arguments, actions come out, in order.
///
/// How an actor carries them out:
/// - A list is carried out to its end before the next event goes in. An event that arises meanwhile
/// (a post
///   that is refused at once is a `batch_completed` with that failure) waits until then. The one
///   exception is `quiescent()`: `fence_transfer` is the last action of its list, so that it may be
///   called at once.
/// - An action that cannot be carried out is an event: `batch_completed(id, failure)` for a post,
///   `local_abort(why)` for a `send_offer` or a message. The machines take events in every state.
/// - A batch that failed since its link broke is better told as `link_lost(why)`: the link's owner
/// knows
///   whether the peer is gone, the batch does not, and the first failure is the outcome.

#include <chrono>
#include <optional>
#include <variant>
#include <vector>

#include "troupe/actors/base/clock.hpp"
#include "troupe/actors/messages/session_messages.hpp"
#include "troupe/transport/backend.hpp"

namespace troupe::actors {

/// Post one batch: push these layers (prefill, write mode; with a `layers_landed` frame behind the
/// bytes) or pull them (decode, read mode). Ends as `batch_completed(id, ...)`. The slice is empty
/// (no layer, no token) when only the state tensors are left to go.
struct post_slice {
  transport::batch_id id;  ///< 1, 2, ... within the transfer; the actor makes it unique on the link
  cache_slice slice;
  bool state{false};                ///< the per-request state tensors go with it
  std::optional<seal_notice> seal;  ///< goes with the notice: this is the last batch
};
/// Send this to the other side.
struct send_message {
  session_message message;
};
/// Give grants on the source blocks of `slice` and send `transfer_offer` (prefill, read mode).
struct send_offer {
  cache_slice slice;           ///< never empty
  bool state{false};           ///< and on the state tensors
  std::vector<std::byte> aux;  ///< for the offer
};
/// Fence the transfer on its link; ends as `quiescent()`. Always the last action of its list.
struct fence_transfer {};
/// Tell the engine that these layers are here (decode). Slices of a layer are told in the order of
/// their tokens, each token once: the layer is complete from the request's first token up to
/// `token_end`.
struct tell_layers {
  cache_slice slice;
};
/// The one outcome of this side: empty is done.
struct conclude {
  std::optional<troupe::error> failure;
  std::vector<std::byte> aux;  ///< decode, done: what came with the seal or the offer
  bool refused{false};  ///< failed: by what was asked for, not by the source (`transfer_abort`)
};
/// Nothing of this transfer can touch local memory any more: drop its pins. Last action of a
/// machine.
struct unpin {};

using session_action = std::variant<post_slice, send_message, send_offer, fence_transfer,
                                    tell_layers, conclude, unpin>;
using session_actions = std::vector<session_action>;

}  // namespace troupe::actors
