#pragma once

#include <optional>
#include <vector>

#include <caf/typed_event_based_actor.hpp>

#include "troupe/actors/context/session_shell.hpp"
#include "troupe/actors/transfer/send_session.hpp"

namespace troupe::actors {

/// The prefill side of one transfer: feeds `send_session` and carries out what it returns. The
/// engine port spawns it when a request meets its source; it quits when the transfer is quiescent.
struct prefill_sender_state {
  transfer_context basis;
  std::optional<send_session> machine;
  static inline const char* name = "prefill_sender";
};

/// Adopts the destination that a request names; a request to read names none. `out_of_range`: other
/// blocks than its tokens need, a block that is named twice, or not a grant for each region.
/// `layout_mismatch`: no slot for its state.
[[nodiscard]] result<void> adopt_destination(transfer_context& basis, transfer_request& request);

struct prefill_sender_options {
  transfer_context basis;  ///< with the destination
  transfer_request request;
  std::vector<std::uint32_t> ready;  ///< per layer, the first token that is not ready yet
  std::optional<std::uint32_t> sealed_tokens;
  std::vector<std::byte> aux;
  time_point deadline;
};

[[nodiscard]] session_actor::behavior_type prefill_sender(
    session_actor::stateful_pointer<prefill_sender_state> self, prefill_sender_options options);

}  // namespace troupe::actors
