#include "troupe/actors/port/engine_port.hpp"

#include <algorithm>
#include <chrono>
#include <tuple>
#include <utility>

#include <spdlog/spdlog.h>

#include "troupe/actors/logging.hpp"
#include "troupe/actors/port/engine_port_parts.hpp"
#include "troupe/actors/runtime/inline_executor.hpp"
#include "troupe/actors/runtime/system.hpp"
#include "troupe/kvcache/overloaded.hpp"

namespace troupe::actors {

namespace port {

namespace {

/// Precision of deadlines.
constexpr auto tick_interval = std::chrono::milliseconds{10};

void arm(self_pointer self) {
  auto& st = self->state;
  if (st.ticking || st.deadlines.empty()) return;
  st.ticking = true;
  self->delayed_send(self, tick_interval, tick_atom::value);
}

// -- outcomes of sessions

void on_session_concluded(self_pointer self, session_concluded& outcome) {
  auto& st = self->state;
  const auto found = st.sessions.find(outcome.transfer);
  if (found == st.sessions.end()) return;
  const auto operation = found->second.operation;
  found->second.report.state = "fencing";
  found->second.report.bytes = outcome.bytes;
  if (st.sources.contains(operation)) {
    sender_concluded(self, operation, outcome);
  } else if (st.receives.contains(operation)) {
    receiver_concluded(self, operation, outcome);
  } else if (st.words.contains(operation)) {
    word_concluded(self, operation, outcome);
  }
}

void on_session_unpinned(self_pointer self, session_unpinned& last) {
  auto& st = self->state;
  const auto found = st.sessions.find(last.transfer);
  if (found == st.sessions.end()) return;
  const auto operation = found->second.operation;
  session_ends(st, last.transfer);
  unpin_value(st, operation);
  if (const auto src = st.sources.find(operation); src != st.sources.end()) {
    src->second.unpinned(last.transfer);
    release_source(self, operation);
  } else if (const auto r = st.receives.find(operation); r != st.receives.end()) {
    --r->second.live;
    release_receive(self, operation);
  }
}

// -- links

void on_link_ready(self_pointer self, link_ready& ready) {
  auto& st = self->state;
  const auto peer = ready.link.peer;
  // Watched here, once, and not by each session: a link remembers whoever watches it until it ends.
  if (st.watched_links.emplace(ready.link.actor.id(), false).second) {
    self->monitor(ready.link.actor);
  }
  if (const auto former = st.links.find(peer); former != st.links.end()) {
    st.leases.unlinked(former->second.peer_incarnation);
  }
  st.links[peer] = ready.link;
  st.leases.linked(ready.link.peer_incarnation);
  // That life had only seemed to leave: the next link with it need not wait for another.
  if (const auto former = st.former_lives.find(peer);
      former != st.former_lives.end() && former->second == ready.link.peer_incarnation.value) {
    st.former_lives.erase(former);
  }
  const auto found = st.waiting_for_link.find(peer);
  if (found == st.waiting_for_link.end()) return;
  const auto waiting = std::move(found->second.waiting);
  st.waiting_for_link.erase(found);
  for (const auto operation : waiting) {
    if (auto order = no_longer_waits(st, operation)) {
      start_client(self, std::move(*order), ready.link);
    } else if (st.words.contains(operation)) {
      start_word_to(self, operation, ready.link);
    } else {
      start_receivers(self, operation);
    }
  }
}

void forget_link(engine_port_state& st, const std::string& peer, caf::actor_id actor) {
  const auto link = st.links.find(peer);
  if (link == st.links.end() || link->second.actor.id() != actor) return;
  st.leases.unlinked(link->second.peer_incarnation);
  st.links.erase(link);
}

void on_link_leaves(self_pointer self, link_leaves& leaves) {
  auto& st = self->state;
  forget_link(st, leaves.peer, leaves.link);
  st.former_lives[leaves.peer] = leaves.peer_incarnation;
  const auto watched = st.watched_links.find(leaves.link);
  if (watched == st.watched_links.end()) return;  // it was never up
  watched->second = true;
  // What it asked for and did not get must not take a source that others may ask for.
  drop_parked(st, [&](const parked_request& one) { return one.link.actor.id() == leaves.link; });
}

void on_link_gone(self_pointer self, link_gone& gone) {
  auto& st = self->state;
  const incarnation life{gone.peer_incarnation};
  forget_link(st, gone.peer, gone.link);
  if (const auto link = st.links.find(gone.peer);
      link == st.links.end() || link->second.peer_incarnation != life) {
    st.send_geometry.erase(life);
    st.receive_geometry.erase(life);
  }
  drop_parked(st, [&](const parked_request& one) { return one.link.actor.id() == gone.link; });
  // What waits now waits for the next link, not for one that had come up, nor for one that answers an
  // earlier question.
  if (st.watched_links.contains(gone.link)) return;
  const auto found = st.waiting_for_link.find(gone.peer);
  if (found == st.waiting_for_link.end() || found->second.ask != gone.asked) return;
  const auto waiting = std::move(found->second.waiting);
  st.waiting_for_link.erase(found);
  for (const auto operation : waiting) {
    if (no_longer_waits(st, operation)) {
      fail_value(st, operation, gone.why);
    } else if (st.receives.contains(operation)) {
      fail_receive(self, operation, gone.why);
    } else if (st.words.contains(operation)) {
      word_cannot_come(self, operation, gone.peer, gone.why);
    }
  }
}

void on_unrouted_message(self_pointer self, unrouted_message& came) {
  auto& message = came.message;
  const auto& sessions = self->state.sessions;
  if (auto* request = std::get_if<transfer_request>(&message)) {
    request_came(self, came.link, std::move(*request));
  } else if (const auto* hold = std::get_if<transfer_hold>(&message)) {
    hold_came(self, came.link, *hold);
  } else if (const auto* forget = std::get_if<transfer_forget>(&message)) {
    forget_came(self, came.link, *forget);
  } else if (const auto session = sessions.find(route_of(message));
             session != sessions.end() && session->second.link == came.link.actor.id()) {
    pass_on(session->second, came.link, std::move(message));
  } else if (const auto* abort = std::get_if<transfer_abort>(&message)) {
    // A request that is still parked was given up, or a hold.
    const auto transfer = abort->transfer;
    if (const auto known = self->state.holds.find(transfer);
        known != self->state.holds.end() && known->second.link.actor.id() == came.link.actor.id()) {
      end_hold(self->state, transfer);
    }
    drop_parked_of(self->state, transfer, [](const parked_request&) { return true; });
    tell(came.link.actor, link_command{say{transfer_quiescent{transfer}, {}}});
  } else if (std::holds_alternative<store_put>(message) ||
             std::holds_alternative<store_get>(message) ||
             std::holds_alternative<store_query>(message) ||
             std::holds_alternative<store_remove>(message) ||
             std::holds_alternative<store_commit>(message)) {
    value_came(self, came.link, message);
  } else {
    // Late words of a transfer that has ended here.
    logger("port")->debug("{} from {} belongs to no transfer", type_name(message), came.link.peer);
  }
}

// -- aborts, deadlines, the end

void end_operation(self_pointer self, operation_id operation, troupe::error why,
                   const session_event& to_sessions) {
  auto& st = self->state;
  if (st.sources.contains(operation)) {
    conclude_source(self, operation, std::move(why), to_sessions);
  } else if (st.receives.contains(operation)) {
    conclude_receive(self, operation, std::move(why), to_sessions);
  } else if (st.words.contains(operation)) {
    conclude_words(self, operation, std::move(why), to_sessions);
  } else if (no_longer_waits(st, operation)) {
    fail_value(st, operation, std::move(why));
  } else if (const auto client = st.value_clients.find(operation);
             client != st.value_clients.end()) {
    tell_session(st, client->second, to_sessions);
  }
}

void on_abort_operation(self_pointer self, abort_operation& order) {
  const troupe::error why{errc::aborted, order.reason};
  end_operation(self, order.operation, why, session_event{abort_session{why}});
}

void on_connect_operations(self_pointer self, connect_operations& order) {
  self->state.node = std::move(order.node);
  self->state.pool = std::move(order.pool);
}

void on_stop_port(self_pointer self) {
  auto& st = self->state;
  st.stopping = true;
  const troupe::error why{errc::aborted, "the node stops"};
  const session_event to_sessions{abort_session{why}};
  std::vector<operation_id> live;
  for (const auto& [operation, src] : st.sources) live.push_back(operation);
  for (const auto& [operation, r] : st.receives) live.push_back(operation);
  for (const auto& [operation, words] : st.words) live.push_back(operation);
  for (const auto& [operation, value] : st.values) live.push_back(operation);
  for (const auto& [operation, client] : st.value_clients) live.push_back(operation);
  for (const auto operation : live) end_operation(self, operation, why, to_sessions);
  for (const auto& [transfer, session] : st.sessions) {
    if (session.operation == operation_id{}) tell(session.actor, to_sessions);
  }
  drop_parked(st, [&](const parked_request& one) {
    refuse_request(one.link, one.request.transfer, why);
    return true;
  });
  // Nothing is held any more; a tick that is due would keep this actor.
  if (st.lease_beat) forget_deadline(st, *st.lease_beat, timer::leases, 0);
  st.lease_beat.reset();
  st.context->counters.port_stops.store(true);
}

void parked_too_long(engine_port_state& st, transfer_id transfer) {
  drop_parked_of(st, transfer, [&](const parked_request& one) {
    const troupe::error late{errc::deadline, "no prefill engine offered request `" +
                                                 one.request.request + "` here in time"};
    refuse_request(one.link, transfer,
                   one.until < one.deadline ? not_offered(one.request.request) : late);
    return true;
  });
}

void deadline_passed(self_pointer self, timer what, std::uint64_t id) {
  auto& st = self->state;
  switch (what) {
    case timer::operation: {
      const operation_id operation{id};
      const auto src = st.sources.find(operation);
      std::string sentence = "the deadline passed";
      if (src != st.sources.end() && src->second.senders().empty()) {
        sentence += " and no decode rank asked for request `" + src->second.spec().request + "`";
      }
      // A sender's own deadline is its decode rank's, which may be later: it must not wait for
      // that.
      const troupe::error why = src != st.sources.end() && src->second.lost()
                                    ? *src->second.lost()
                                    : troupe::error{errc::deadline, sentence};
      end_operation(self, operation, why, session_event{abort_session{why}});
      return;
    }
    case timer::session:
      tell_session(st, transfer_id{id}, session_event{deadline_reached{}});
      return;
    case timer::parked: parked_too_long(st, transfer_id{id}); return;
    case timer::leases: lease_beat(self); return;
  }
}

void tick(self_pointer self) {
  auto& st = self->state;
  st.ticking = false;
  const auto time = now();
  while (!st.deadlines.empty() && std::get<time_point>(*st.deadlines.begin()) <= time) {
    const auto [when, what, id] = *st.deadlines.begin();
    st.deadlines.erase(st.deadlines.begin());
    deadline_passed(self, what, id);
  }
  arm(self);
}

transfer_reports describe(const engine_port_state& st) {
  transfer_reports all;
  for (const auto& [peer, line] : st.waiting_for_link) all.waiting_for_link += line.waiting.size();
  const auto time = now();
  for (const auto& [transfer, session] : st.sessions) {
    auto report = session.report;
    report.age_ms = static_cast<std::uint32_t>(
        std::chrono::duration_cast<std::chrono::milliseconds>(time - session.started).count());
    all.transfers.push_back(std::move(report));
  }
  for (const auto& [transfer, hold] : st.holds) {
    const auto source = st.sources.find(hold.source);
    if (source == st.sources.end()) continue;
    transfer_report report;
    report.transfer = transfer.value;
    report.request = source->second.spec().request;
    report.peer = hold.link.peer;
    report.side = "held";
    report.state = "waiting for its receive";
    report.age_ms = static_cast<std::uint32_t>(
        std::chrono::duration_cast<std::chrono::milliseconds>(time - hold.since).count());
    all.transfers.push_back(std::move(report));
  }
  for (const auto& [peer, count] : st.parked_of) all.parked.push_back({peer, count});
  return all;
}

/// What waits for transfers to end, or bounds how many there are, waits for this one no more.
void count_as_crashed(engine_port_state& st, live_session& session) {
  session.report.state = "crashed";
  if (!std::exchange(session.crashed, true)) ++st.crashed_sessions;
  if (std::exchange(session.served, false)) --st.served_count;
  count_sessions(st);
}

/// A link's actor ended. Sessions that it never heard of get no answer from it: it granted nothing
/// for them, so that nothing of them can move. After a crash of the link nobody knows; the pins
/// stay.
void link_ended(engine_port_state& st, caf::actor_id link, bool crashed) {
  // One that crashed has not said that it is gone: the next operation needs another one.
  std::erase_if(st.links, [&](const auto& known) {
    if (known.second.actor.id() != link) return false;
    st.leases.unlinked(known.second.peer_incarnation);
    return true;
  });
  drop_parked(st, [&](const parked_request& one) { return one.link.actor.id() == link; });
  end_holds_over(st, link);
  for (auto& [transfer, session] : st.sessions) {
    if (session.link != link) continue;
    if (crashed) count_as_crashed(st, session);
    tell(session.actor, session_event{link_is_lost{
                            {errc::peer_lost, "the link to " + session.report.peer + " is gone"}}});
    if (!crashed) {
      tell(session.actor, session_event{transfer_fenced{}});
    } else if (st.value_clients.erase(session.operation) != 0) {
      // Its client would wait for the fence.
      lose_value(st, session.operation,
                 {errc::peer_lost, "the actor of the link to " + session.report.peer + " crashed"});
    }
  }
}

/// An actor of one transfer ended by a defect of ours. Its operation fails; its blocks stay pinned,
/// since nobody is left to say that nothing can touch them any more.
void session_crashed(self_pointer self, const caf::down_msg& down) {
  if (!down.reason) return;
  auto& st = self->state;
  const auto crashed = std::ranges::find_if(
      st.sessions, [&](const auto& entry) { return entry.second.actor.address() == down.source; });
  if (crashed == st.sessions.end()) return;
  const troupe::error why{errc::internal, "the actor of the transfer crashed; see the log"};
  logger("port")->error(
      "transfer {:016x} request {}: its actor crashed ({}); its blocks stay pinned",
      crashed->first.value, crashed->second.report.request, self->system().render(down.reason));
  // Nobody else would tell the other side, which would wait until its deadline.
  const auto link = st.links.find(crashed->second.report.peer);
  if (link != st.links.end() && link->second.actor.id() == crashed->second.link) {
    refuse_request(link->second, crashed->first, why);
  }
  count_as_crashed(st, crashed->second);
  const auto operation = crashed->second.operation;
  // A value's own actor is the only one that knows of its outcome, and of who may read what is put.
  if (st.value_clients.erase(operation) != 0) {
    lose_value(st, operation, why);
  } else if (const auto src = st.sources.find(operation); src != st.sources.end()) {
    if (src->second.concluded) return;
    st.leases.leave(operation, crashed->first, now());
    rank_failed(self, operation, crashed->first, why);
  } else {
    end_operation(self, operation, why, session_event{abort_session{why}});
  }
}

}  // namespace

}  // namespace port

engine_port_actor::behavior_type engine_port(
    engine_port_actor::stateful_pointer<engine_port_state> self, context_ptr context) {
  set_log_handlers(*self, "port");
  using namespace port;
  self->state.context = std::move(context);
  self->state.leases = cache_leases{{incarnation{self->state.context->self.incarnation},
                                     self->state.context->settings.source_lease}};
  self->set_down_handler([self](const caf::down_msg& down) {
    if (self->state.watched_links.erase(down.source.id()) != 0) {
      link_ended(self->state, down.source.id(), static_cast<bool>(down.reason));
    } else {
      session_crashed(self, down);
    }
  });
  return {
      [self](engine_command& command) {
        std::visit(overloaded{[self](start_send& x) { on_start_send(self, x); },
                              [self](send_grew& x) { on_send_grew(self, x); },
                              [self](send_progress& x) { on_send_progress(self, x); },
                              [self](send_sealed& x) { on_send_sealed(self, x); },
                              [self](start_receive& x) { on_start_receive(self, x); },
                              [self](open_when_complete& x) { on_open_when_complete(self, x); },
                              [self](abort_operation& x) { on_abort_operation(self, x); },
                              [self](start_value& x) { on_start_value(self, x); },
                              [self](start_word& x) { on_start_word(self, x); },
                              [self](connect_operations& x) { on_connect_operations(self, x); },
                              [self](stop_port&) { on_stop_port(self); }},
                   command.what);
        arm(self);
      },
      [self](port_event& event) {
        std::visit(overloaded{[self](link_ready& x) { on_link_ready(self, x); },
                              [self](link_leaves& x) { on_link_leaves(self, x); },
                              [self](link_gone& x) { on_link_gone(self, x); },
                              [self](unrouted_message& x) { on_unrouted_message(self, x); },
                              [self](session_layers& x) { on_session_layers(self, x); },
                              [self](session_concluded& x) { on_session_concluded(self, x); },
                              [self](session_unpinned& x) { on_session_unpinned(self, x); },
                              [self](value_concluded& x) { on_value_concluded(self, x); },
                              [self](blocks_granted& x) { on_blocks_granted(self, x); },
                              [self](gpu_point_reached& x) { on_gpu_point_reached(self, x); }},
                   event.what);
        arm(self);
      },
      [self](node_notice& notice) {
        std::visit(overloaded{[self](membership_changed& x) { on_membership_changed(self, x); },
                              [self](heartbeat_answered& x) { on_heartbeat_answered(self, x); }},
                   notice.what);
        arm(self);
      },
      [self](report_atom) { return describe(self->state); },
      [self](tick_atom) { tick(self); },
  };
}

}  // namespace troupe::actors
