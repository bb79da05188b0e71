#pragma once

#include <cstdint>
#include <string>

#include <caf/typed_event_based_actor.hpp>

#include "troupe/actors/messages/messages.hpp"

namespace troupe::actors {

/// One `release` or `hold` at one source of its request. Spawned by the engine port. Nothing is granted
/// to a peer and nothing posted, so there is nothing to fence: it ends with its outcome.
///
///   event                        next   actions
///   ---------------------------  -----  -------
///   begin, link back             asked  send transfer_forget (release) or transfer_hold (hold)
///   transfer_release             ended  done: the source has ended, or there is none
///   transfer_abort               ended  failed: why it goes on, or how the held source ended
///   abort                        ended  failed; of a hold, send transfer_abort
///   receive_is_whole             ended  done; of a hold, send transfer_abort: it was asked for
///   link lost                    ended  failed
struct source_word_state {
  std::string
      request;  // first: CAF would make a state that begins with a handle of the actor itself
  engine_port_actor port;
  link_handle link;
  transfer_id transfer;
  source_verb verb{source_verb::release};
  std::uint64_t life{0};
  bool ended{false};
  static inline const char* name = "source_word";
};

struct source_word_options {
  engine_port_actor port;
  link_handle link;
  transfer_id transfer;
  source_verb verb{source_verb::release};
  std::string request;
  std::uint64_t life{0};  ///< of the source; 0: any
};

[[nodiscard]] session_actor::behavior_type source_word(
    session_actor::stateful_pointer<source_word_state> self, source_word_options options);

}  // namespace troupe::actors
