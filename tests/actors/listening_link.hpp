#pragma once

/// A link to nobody, which keeps what is said over it, for tests of the engine port. A double: a real
/// peer cannot be made to say what is not to be said.

#include <map>
#include <memory>

#include "dialling_node.hpp"

namespace troupe::actors::testing {

/// What its sessions say, what they post (batch, epoch), and those. Fences at once.
struct heard_words {
  inbox<session_message> said;
  inbox<std::pair<transport::batch_id, std::uint64_t>> batches;
  inbox<session_actor> sessions;
};

inline link_actor::behavior_type listening_link(link_actor::pointer,
                                                std::shared_ptr<heard_words> heard) {
  const auto by_transfer = std::make_shared<std::map<transfer_id, session_actor>>();
  return {
      [=](link_command& command) {
        if (const auto* who = std::get_if<attach_session>(&command.what)) {
          by_transfer->insert_or_assign(who->transfer, who->session);
          heard->sessions.put(who->session);
        } else if (const auto* words = std::get_if<say>(&command.what)) {
          heard->said.put(words->message);
        } else if (const auto* posted = std::get_if<post_batch>(&command.what)) {
          heard->batches.put({posted->work.id, posted->epoch});
        } else if (const auto* fence = std::get_if<fence_now>(&command.what)) {
          caf::anon_send(by_transfer->at(fence->transfer), session_event{transfer_is_quiescent{}});
        }
      },
      [](link_event&) {},
      [](const link_request&) { return link_reply{}; },
      [](const link_notice&) {},
      [](report_atom) { return link_report{}; },
  };
}

}  // namespace troupe::actors::testing
