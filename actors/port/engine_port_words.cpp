#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "troupe/actors/context/engine_checks.hpp"
#include "troupe/actors/port/engine_port_parts.hpp"
#include "troupe/actors/port/source_word.hpp"
#include "troupe/actors/runtime/inline_executor.hpp"

namespace troupe::actors::port {

// -- our own, decode side

void conclude_words(self_pointer self, operation_id operation, std::optional<troupe::error> failure,
                    const session_event& to_sessions) {
  auto& st = self->state;
  const auto found = st.words.find(operation);
  if (found == st.words.end()) return;
  const auto words = std::move(found->second);
  st.words.erase(found);
  forget_deadline(st, words.deadline, timer::operation, operation.value);
  if (words.verb == source_verb::hold) st.hold_of.erase(words.request);
  for (const auto& to : words.sources) {
    if (!to.transfer) {
      leave_link_line(st, to.peer, operation);
    } else if (!to.ended) {
      tell_session(st, *to.transfer, to_sessions);
    }
  }
  if (failure) {
    tell_last_outcome(st, operation, event_failed{std::move(*failure)});
  } else {
    tell_last_outcome(st, operation, event_done{});
  }
}

namespace {

/// One source has answered, or will not.
void has_ended(self_pointer self, operation_id operation, words_to_sources::to_source& at,
               std::optional<troupe::error> failure) {
  auto& words = self->state.words.at(operation);
  at.ended = true;
  if (words.verb == source_verb::hold) {
    // What one of them cannot give, nobody can have.
    const troupe::error others{errc::aborted, "the source at " + at.peer + " has ended"};
    conclude_words(self, operation, std::move(failure), session_event{abort_session{others}});
    return;
  }
  if (failure && !words.failure) words.failure = std::move(failure);
  if (std::ranges::all_of(words.sources, &words_to_sources::to_source::ended)) {
    conclude_words(self, operation, std::move(words.failure), session_event{receive_is_whole{}});
  }
}

/// The source at that node, if it waits for its link. A node is named once.
words_to_sources::to_source* waiting_source(engine_port_state& st, operation_id operation,
                                            const std::string& peer) {
  const auto words = st.words.find(operation);
  if (words == st.words.end()) return nullptr;
  auto& sources = words->second.sources;
  const auto at = std::ranges::find(sources, peer, &words_to_sources::to_source::peer);
  const bool waits = at != sources.end() && !at->transfer && !at->ended;
  return waits ? &*at : nullptr;
}

void say_word(self_pointer self, operation_id operation, words_to_sources::to_source& to,
              const link_handle& link) {
  auto& st = self->state;
  auto& words = st.words.at(operation);
  to.transfer = new_transfer(st);
  auto word = self->spawn<caf::monitored>(
      source_word, source_word_options{caf::actor_cast<engine_port_actor>(self), link, *to.transfer,
                                       words.verb, words.request, to.life});
  const auto* side = words.verb == source_verb::hold ? "hold" : "release";
  session_begins(st, operation, *to.transfer, std::move(word), link,
                 report_of(words.request, link, side, "asked"), no_deadline);
}

}  // namespace

void start_word_to(self_pointer self, operation_id operation, const link_handle& link) {
  auto* to = waiting_source(self->state, operation, link.peer);
  if (to == nullptr) return;
  if (auto meant = check_life(link.peer, link.peer_incarnation.value, to->life); meant) {
    say_word(self, operation, *to, link);
  } else {
    has_ended(self, operation, *to, meant.error());
  }
}

void word_cannot_come(self_pointer self, operation_id operation, const std::string& peer,
                      const troupe::error& why) {
  // The others are still told.
  if (auto* to = waiting_source(self->state, operation, peer); to != nullptr)
    has_ended(self, operation, *to, why);
}

void on_start_word(self_pointer self, start_word& order) {
  auto& st = self->state;
  const auto operation = order.operation;
  auto& words = st.words[operation];
  words.verb = order.verb;
  words.request = std::move(order.request);
  // A hold lasts until somebody ends it.
  words.deadline = words.verb == source_verb::hold
                       ? no_deadline
                       : deadline_after(st, std::chrono::milliseconds{});
  if (words.verb == source_verb::hold) {
    st.hold_of[words.request] = operation;
  } else {
    st.deadlines.emplace(words.deadline, timer::operation, operation.value);
  }
  for (std::size_t i = 0; i < order.sources.size(); ++i) {
    words.sources.push_back(
        {order.sources[i], order.lives.empty() ? 0 : order.lives[i], std::nullopt, false});
  }
  if (st.stopping) {
    conclude_words(self, operation, troupe::error{errc::aborted, "the node stops"}, {});
    return;
  }
  for (const auto& peer : order.sources) {
    if (const auto link = st.links.find(peer); link != st.links.end()) {
      start_word_to(self, operation, link->second);
    } else if (st.words.contains(operation)) {
      wait_for_link(st, peer, operation);
    }
  }
}

void word_concluded(self_pointer self, operation_id operation, session_concluded& outcome) {
  auto& sources = self->state.words.at(operation).sources;
  const auto at = std::ranges::find(sources, std::optional{outcome.transfer},
                                    &words_to_sources::to_source::transfer);
  if (at != sources.end()) has_ended(self, operation, *at, std::move(outcome.failure));
}

void end_own_hold(self_pointer self, const std::string& request) {
  const auto& holds = self->state.hold_of;
  const auto found = holds.find(request);
  if (found != holds.end()) {
    conclude_words(self, found->second, std::nullopt, session_event{receive_is_whole{}});
  }
}

// -- of peers, prefill side

namespace {

/// Whether the peer may speak of our sources at all.
result<void> check_word(const engine_port_state& st, const link_handle& link, std::uint64_t life) {
  if (st.stopping) return fail(errc::aborted, "the node stops");
  const auto& ours = st.context->self;
  if (auto meant = check_life(ours.name, ours.incarnation, life); !meant) return meant;
  const auto stage = stage_of_peer(*st.context, link.peer);
  if (!stage) return fail(stage.error());
  if (stage->empty()) return {};
  return check_any_edge(st.context->settings, st.context->self.stage, *stage);
}

/// Another node that takes the source, or is to: for that one it goes on.
std::optional<std::string> other_taker(const engine_port_state& st, const source& src,
                                       const std::string& peer) {
  for (const auto sender : src.senders()) {
    const auto session = st.sessions.find(sender);
    if (session != st.sessions.end() && session->second.report.peer != peer)
      return session->second.report.peer;
  }
  for (const auto holder : src.holders) {
    const auto& its = st.holds.at(holder).link.peer;
    if (its != peer) return its;
  }
  const auto& for_whom = src.spec().held_for;
  const bool is_meant = for_whom.empty() || std::ranges::find(for_whom, peer) != for_whom.end();
  return is_meant ? std::nullopt : std::optional{for_whom.front()};
}

/// Another node that waits for the request to be sent.
std::optional<std::string> other_asker(const engine_port_state& st, const std::string& request,
                                       const std::string& peer) {
  const auto found = st.parked.find(request);
  if (found == st.parked.end()) return std::nullopt;
  const auto other = std::ranges::find_if(
      found->second, [&](const parked_request& one) { return one.link.peer != peer; });
  return other == found->second.end() ? std::nullopt : std::optional{other->link.peer};
}

void say_ended(const link_handle& link, transfer_id transfer) {
  tell(link.actor, link_command{say{transfer_release{transfer}, {}}});
}

}  // namespace

void forget_came(self_pointer self, const link_handle& link, const transfer_forget& word) {
  auto& st = self->state;
  if (auto may = check_word(st, link, word.life); !may) {
    refuse_request(link, word.transfer, may.error());
    return;
  }
  const auto of = st.source_of.find(word.request);
  const bool is_sent = of != st.source_of.end();
  if (const auto other = is_sent ? other_taker(st, st.sources.at(of->second), link.peer)
                                 : other_asker(st, word.request, link.peer)) {
    refuse_request(link, word.transfer,
                   {errc::already_exists, "request `" + word.request + "` goes on for " + *other +
                                              "; only that node gives it back"});
    return;
  }
  const troupe::error why{errc::aborted,
                          link.peer + " gave request `" + word.request + "` back: nobody wants it"};
  if (is_sent) {
    conclude_source(self, of->second, why, session_event{abort_session{why}});
  } else if (st.ended.find(word.request) == nullptr) {
    st.given_back.remember(word.request, {ended_requests::how::failed, why});
    drop_parked_for(st, word.request, [&](const parked_request& one) {
      refuse_request(one.link, one.request.transfer, why);
      return true;
    });
  }
  say_ended(link, word.transfer);
}

void hold_came(self_pointer self, const link_handle& link, const transfer_hold& word) {
  auto& st = self->state;
  if (auto may = check_word(st, link, word.life); !may) {
    refuse_request(link, word.transfer, may.error());
    return;
  }
  if (const auto known = st.holds.find(word.transfer); known != st.holds.end()) {
    if (known->second.link.actor.id() == link.actor.id()) {
      known->second.link = link;  // said again over the link that was made again
    } else {
      refuse_request(link, word.transfer, {errc::already_exists, "that hold is another node's"});
    }
    return;
  }
  const auto of = st.source_of.find(word.request);
  if (of == st.source_of.end()) {
    const auto* end = st.ended.find(word.request);
    if (end != nullptr && end->came == ended_requests::how::delivered) {
      say_ended(link, word.transfer);
    } else {
      refuse_request(link, word.transfer,
                     end != nullptr
                         ? end->told
                         : troupe::error{errc::not_found, "request `" + word.request +
                                                              "` is not offered here: there is "
                                                              "nothing to hold"});
    }
    return;
  }
  auto& src = st.sources.at(of->second);
  const auto former = std::ranges::find_if(
      src.holders, [&](const transfer_id one) { return st.holds.at(one).link.peer == link.peer; });
  if (former != src.holders.end()) {
    const auto replaced = *former;
    refuse_request(st.holds.at(replaced).link, replaced,
                   {errc::aborted, "this node holds it by another word now"});
    end_hold(st, replaced);
  }
  if (st.holds.size() >= st.context->settings.max_operations) {
    refuse_request(
        link, word.transfer,
        {errc::overloaded, std::to_string(st.holds.size()) + " sources are held here, which is "
                                                             "limits.max_operations: hold fewer"});
    return;
  }
  st.holds.emplace(word.transfer, source_hold{of->second, link, now()});
  src.holders.insert(word.transfer);
  st.leases.keep(of->second, word.transfer, link.peer, link.peer_incarnation, now());
  lengthen_if_filled(st, of->second, src);
  watch_leases(st);
}

void tell_holders(engine_port_state& st, source& src, const std::optional<troupe::error>& failure) {
  for (const auto transfer : src.holders) {
    const auto found = st.holds.find(transfer);
    if (failure) {
      refuse_request(found->second.link, transfer, *failure);
    } else {
      say_ended(found->second.link, transfer);
    }
    st.holds.erase(found);
  }
  src.holders.clear();
}

void end_hold(engine_port_state& st, transfer_id transfer) {
  const auto found = st.holds.find(transfer);
  if (found == st.holds.end()) return;
  const auto of = found->second.source;
  st.sources.at(of).holders.erase(transfer);
  st.leases.leave(of, transfer, now());
  st.holds.erase(found);
}

void end_holds_over(engine_port_state& st, caf::actor_id link) {
  std::vector<transfer_id> over;
  for (const auto& [transfer, hold] : st.holds) {
    if (hold.link.actor.id() == link) over.push_back(transfer);
  }
  for (const auto transfer : over) end_hold(st, transfer);
}

}  // namespace troupe::actors::port
