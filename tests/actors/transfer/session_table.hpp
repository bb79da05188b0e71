#pragma once

/// Formats the actions of a state machine as one short line, for transition tables.

#include <sstream>
#include <string>
#include <string_view>
#include <variant>

#include "troupe/actors/transfer/session_actions.hpp"

namespace troupe::actors {

/// "post(1: 0-2 x 0-8 state) send(transfer_sealed) conclude(done) fence"
inline std::string describe(const session_actions& actions) {
  std::ostringstream line;
  const auto slice = [&line](const cache_slice& c, bool state) {
    line << c.layer_begin << "-" << c.layer_end << " x " << c.token_begin << "-" << c.token_end
         << (state ? " state)" : ")");
  };
  for (const auto& action : actions) {
    if (line.tellp() > 0) line << " ";
    if (const auto* p = std::get_if<post_slice>(&action)) {
      line << "post(" << p->id.value << ": ";
      slice(p->slice, p->state);
      if (p->seal) line << " sealed " << p->seal->batches;
    } else if (const auto* m = std::get_if<send_message>(&action)) {
      line << "send(" << type_name(m->message);
      if (const auto* a = std::get_if<transfer_abort>(&m->message))
        line << " " << to_string(a->code);
      if (const auto* s = std::get_if<transfer_sealed>(&m->message)) line << " " << s->batches;
      if (const auto* r = std::get_if<transfer_request>(&m->message); r && r->progress) {
        line << " again";
        for (const auto token : r->progress->here) line << " " << token;
      }
      line << ")";
    } else if (const auto* o = std::get_if<send_offer>(&action)) {
      line << "offer(";
      slice(o->slice, o->state);
    } else if (std::holds_alternative<fence_transfer>(action)) {
      line << "fence";
    } else if (const auto* t = std::get_if<tell_layers>(&action)) {
      line << "tell(";
      slice(t->slice, false);
    } else if (const auto* c = std::get_if<conclude>(&action)) {
      line << "conclude(" << (c->failure ? to_string(c->failure->code) : std::string_view{"done"})
           << ")";
    } else {
      line << "unpin";
    }
  }
  return line.str();
}

/// "next state: actions", or "=" if the machine did nothing and stayed in its state.
template <class State>
std::string describe(State before, State after, const session_actions& actions) {
  std::ostringstream line;
  if (before == after && actions.empty()) {
    line << "=";
  } else {
    line << to_string(after) << ": " << describe(actions);
  }
  return line.str();
}

}  // namespace troupe::actors
