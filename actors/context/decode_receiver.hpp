#pragma once

#include <optional>

#include <caf/typed_event_based_actor.hpp>

#include "troupe/actors/context/session_shell.hpp"
#include "troupe/actors/transfer/receive_session.hpp"

namespace troupe::actors {

/// The decode side of one transfer: feeds `receive_session` and carries out what it returns. The
/// engine port spawns it once the blocks are allocated and the link is up; it quits when the
/// transfer is quiescent.
struct decode_receiver_state {
  transfer_context basis;
  std::optional<receive_session> machine;
  time_point deadline;
  std::optional<time_point> park_until;
  static inline const char* name = "decode_receiver";
};

struct decode_receiver_options {
  transfer_context basis;
  transfer_request request;  ///< without grants, and without its two remaining times
  time_point deadline;
  std::optional<time_point> park_until{};  ///< the source may still be offered until then
};

[[nodiscard]] session_actor::behavior_type decode_receiver(
    session_actor::stateful_pointer<decode_receiver_state> self, decode_receiver_options options);

}  // namespace troupe::actors
