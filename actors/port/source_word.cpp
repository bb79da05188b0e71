#include "troupe/actors/port/source_word.hpp"

#include <optional>
#include <utility>

#include "troupe/actors/runtime/ask_link.hpp"
#include "troupe/actors/runtime/inline_executor.hpp"
#include "troupe/kvcache/overloaded.hpp"

namespace troupe::actors {

namespace {

using self_pointer = session_actor::stateful_pointer<source_word_state>;

void ask(self_pointer self) {
  const auto& st = self->state;
  if (st.verb == source_verb::release) {
    ask_link(self, say{transfer_forget{st.transfer, st.request, st.life}, {}});
  } else {
    ask_link(self, say{transfer_hold{st.transfer, st.request, st.life}, {}});
  }
}

void end(self_pointer self, std::optional<troupe::error> failure) {
  auto& st = self->state;
  if (std::exchange(st.ended, true)) return;
  ask_link(self, detach_session{st.transfer});
  self->send(st.port, port_event{session_concluded{st.transfer, std::move(failure), {}, 0}});
  self->send(st.port, port_event{session_unpinned{st.transfer}});
  self->quit();
}

/// Tells the source that we no longer hold it.
void let_go(self_pointer self, const troupe::error& why) {
  const auto& st = self->state;
  if (st.ended || st.verb != source_verb::hold) return;
  ask_link(self, say{make_abort(st.transfer, why), {}});
}

void on_session_message(self_pointer self, session_message& message) {
  if (const auto* abort = std::get_if<transfer_abort>(&message)) {
    end(self, troupe::error{abort->code, abort->reason});
  } else if (std::holds_alternative<transfer_release>(message)) {
    end(self, std::nullopt);
  }
}
void on_link_is_lost(self_pointer self, link_is_lost& lost) {
  end(self, std::move(lost.why));
}
void on_link_is_back(self_pointer self, const link_is_back& back) {
  auto& st = self->state;
  if (back.epoch <= st.link.epoch) return;
  st.link.epoch = back.epoch;
  ask(self);
}
void on_abort_session(self_pointer self, abort_session& abort) {
  let_go(self, abort.why);
  end(self, std::move(abort.why));
}
void on_receive_is_whole(self_pointer self) {
  let_go(self, {errc::aborted, "it was asked for"});
  end(self, std::nullopt);
}

}  // namespace

session_actor::behavior_type source_word(session_actor::stateful_pointer<source_word_state> self,
                                         source_word_options options) {
  auto& st = self->state;
  st.port = std::move(options.port);
  st.link = std::move(options.link);
  st.transfer = options.transfer;
  st.verb = options.verb;
  st.request = std::move(options.request);
  st.life = options.life;
  ask_link(self, attach_session{st.transfer, caf::actor_cast<session_actor>(self)});
  ask(self);
  return {[self](session_event& event) {
    std::visit(overloaded{[self](session_message& x) { on_session_message(self, x); },
                          [](transport::completion&) {}, [](transfer_fenced&) {},
                          [self](link_is_lost& x) { on_link_is_lost(self, x); },
                          [self](link_is_back& x) { on_link_is_back(self, x); },
                          [](source_progress&) {}, [](source_blocks&) {}, [](source_sealed&) {},
                          [self](abort_session& x) { on_abort_session(self, x); },
                          [](deadline_reached&) {},
                          [self](receive_is_whole&) { on_receive_is_whole(self); }},
               event.what);
  }};
}

}  // namespace troupe::actors
