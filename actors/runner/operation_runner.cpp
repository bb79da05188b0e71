#include "troupe/actors/runner/operation_runner.hpp"

#include <algorithm>
#include <chrono>
#include <memory>
#include <tuple>
#include <utility>

#include <spdlog/spdlog.h>

#include "troupe/actors/logging.hpp"
#include "troupe/actors/runner/session_fence.hpp"
#include "troupe/actors/values/value_regions.hpp"
#include "troupe/kvcache/overloaded.hpp"

namespace troupe::actors::operations {

namespace {

/// Precision of deadlines.
constexpr auto tick_interval = std::chrono::milliseconds{10};

/// The error of an operation on a keyed value that nobody can say the end of.
troupe::error in_doubt(troupe::error why) {
  why.message += "; if it was a put, it is not known whether the value is stored";
  return why;
}

troupe::error take_owed(live_session& session) {
  auto owed = std::move(*session.owed);
  session.owed.reset();
  return owed;
}

}  // namespace

operation_runner::operation_runner(runner_surroundings& around, context_ptr context)
    : around_{around},
      context_{std::move(context)},
      leases_{{incarnation{context_->self.incarnation}, context_->settings.source_lease}} {}

void operation_runner::arm() {
  if (ticking_ || deadlines_.empty()) return;
  ticking_ = true;
  around_.wake_after(tick_interval);
}

// -- outcomes of sessions

void operation_runner::on_session_concluded(session_concluded& outcome) {
  const auto found = sessions_.find(outcome.transfer);
  if (found == sessions_.end()) return;
  const auto operation = found->second.operation;
  found->second.report.state = "fencing";
  found->second.report.bytes = outcome.bytes;
  if (sources_.contains(operation)) {
    sender_concluded(operation, outcome);
  } else if (receives_.contains(operation)) {
    receiver_concluded(operation, outcome);
  } else if (words_.contains(operation)) {
    word_concluded(operation, outcome);
  }
}

void operation_runner::on_session_unpinned(session_unpinned& last) {
  const auto found = sessions_.find(last.transfer);
  if (found == sessions_.end()) return;
  const auto operation = found->second.operation;
  auto owed = std::move(found->second.owed);
  session_ends(last.transfer);
  unpin_value(operation);
  if (owed) fail_value(operation, std::move(*owed));
  if (const auto src = sources_.find(operation); src != sources_.end()) {
    src->second.unpinned(last.transfer);
    release_source(operation);
  } else if (const auto r = receives_.find(operation); r != receives_.end()) {
    --r->second.live;
    release_receive(operation);
  }
}

// -- links

void operation_runner::on_link_ready(link_ready& ready) {
  const auto peer = ready.link.peer;
  // Watched here, once, and not by each session: a link keeps every monitor until it ends.
  if (watched_links_.emplace(ready.link.id, false).second) around_.watch_link(ready.link);
  if (const auto former = links_.find(peer); former != links_.end()) {
    leases_.unlinked(former->second.peer_incarnation);
  }
  links_[peer] = ready.link;
  leases_.linked(ready.link.peer_incarnation);
  // That life only seemed to leave: the next link with it need not wait for another life.
  if (const auto former = former_lives_.find(peer);
      former != former_lives_.end() && former->second == ready.link.peer_incarnation.value) {
    former_lives_.erase(former);
  }
  const auto found = waiting_for_link_.find(peer);
  if (found == waiting_for_link_.end()) return;
  const auto waiting = std::move(found->second.waiting);
  waiting_for_link_.erase(found);
  for (const auto operation : waiting) {
    if (auto order = no_longer_waits(operation)) {
      start_client(std::move(*order), ready.link);
    } else if (words_.contains(operation)) {
      start_word_to(operation, ready.link);
    } else {
      start_receivers(operation);
    }
  }
}

void operation_runner::forget_link(const std::string& peer, std::uint64_t actor) {
  const auto link = links_.find(peer);
  if (link == links_.end() || link->second.id != actor) return;
  leases_.unlinked(link->second.peer_incarnation);
  links_.erase(link);
}

void operation_runner::on_link_draining(link_draining& leaves) {
  forget_link(leaves.peer, leaves.link);
  former_lives_[leaves.peer] = leaves.peer_incarnation;
  const auto watched = watched_links_.find(leaves.link);
  if (watched == watched_links_.end()) return;  // it was never up
  watched->second = true;
  // Its parked requests must not take a source that others may ask for.
  drop_parked([&](const parked_request& one) { return one.link.id == leaves.link; });
}

void operation_runner::on_link_gone(link_gone& gone) {
  const incarnation life{gone.peer_incarnation};
  forget_link(gone.peer, gone.link);
  if (const auto link = links_.find(gone.peer);
      link == links_.end() || link->second.peer_incarnation != life) {
    send_geometry_.erase(life);
    receive_geometry_.erase(life);
  }
  drop_parked([&](const parked_request& one) { return one.link.id == gone.link; });
  // Operations that wait from here on need the next link, not one that was up already or one that
  // answers an earlier question.
  if (watched_links_.contains(gone.link)) return;
  const auto found = waiting_for_link_.find(gone.peer);
  if (found == waiting_for_link_.end() || found->second.ask != gone.asked) return;
  const auto waiting = std::move(found->second.waiting);
  waiting_for_link_.erase(found);
  for (const auto operation : waiting) {
    if (no_longer_waits(operation)) {
      fail_value(operation, gone.why);
    } else if (receives_.contains(operation)) {
      fail_receive(operation, gone.why);
    } else if (words_.contains(operation)) {
      word_cannot_come(operation, gone.peer, gone.why);
    }
  }
}

void operation_runner::on_unrouted_message(unrouted_message& came) {
  auto& message = came.message;
  const auto& sessions = sessions_;
  // No transfer of ours has it, and leases take it for a claim that nobody has met.
  if (route_of(message) == transfer_id{}) {
    refuse_request(came.link, {}, {errc::out_of_range, "a transfer's id must not be 0"});
    return;
  }
  if (auto* request = std::get_if<transfer_request>(&message)) {
    request_came(came.link, std::move(*request));
  } else if (const auto* hold = std::get_if<transfer_hold>(&message)) {
    hold_came(came.link, *hold);
  } else if (const auto* forget = std::get_if<transfer_forget>(&message)) {
    forget_came(came.link, *forget);
  } else if (const auto session = sessions.find(route_of(message));
             session != sessions.end() && session->second.link.id == came.link.id) {
    pass_on(session->first, came.link, std::move(message));
  } else if (const auto* abort = std::get_if<transfer_abort>(&message)) {
    // The peer gave up a request that is still parked, or a hold.
    const auto transfer = abort->transfer;
    if (const auto known = holds_.find(transfer);
        known != holds_.end() && known->second.link.id == came.link.id) {
      end_hold(transfer);
    }
    drop_parked_of(transfer,
                   [&](const parked_request& one) { return one.link.id == came.link.id; });
    say_over(came.link, transfer_quiescent{transfer});
  } else if (std::holds_alternative<store_put>(message) ||
             std::holds_alternative<store_get>(message) ||
             std::holds_alternative<store_query>(message) ||
             std::holds_alternative<store_remove>(message) ||
             std::holds_alternative<store_commit>(message)) {
    value_came(came.link, message);
  } else {
    // Messages that arrive after this side has ended the transfer.
    logger("operations")
        ->debug("{} from {} belongs to no transfer", type_name(message), came.link.peer);
  }
}

// -- aborts, deadlines, the end

void operation_runner::end_operation(operation_id operation, troupe::error why,
                                     const session_event& to_sessions) {
  if (sources_.contains(operation)) {
    conclude_source(operation, std::move(why), to_sessions);
  } else if (receives_.contains(operation)) {
    conclude_receive(operation, std::move(why), to_sessions);
  } else if (words_.contains(operation)) {
    conclude_words(operation, std::move(why), to_sessions);
  } else if (no_longer_waits(operation)) {
    fail_value(operation, std::move(why));
  } else if (const auto client = value_clients_.find(operation); client != value_clients_.end()) {
    tell_session(client->second, to_sessions);
  }
}

void operation_runner::on_abort_operation(abort_operation& order) {
  const troupe::error why{errc::aborted, order.reason};
  end_operation(order.operation, why, session_event{abort_session{why}});
}

void operation_runner::on_stop_runner() {
  stopping_ = true;
  const troupe::error why{errc::aborted, "the node stops"};
  const session_event to_sessions{abort_session{why}};
  std::vector<operation_id> live;
  for (const auto& [operation, src] : sources_) live.push_back(operation);
  for (const auto& [operation, r] : receives_) live.push_back(operation);
  for (const auto& [operation, words] : words_) live.push_back(operation);
  for (const auto& [operation, value] : values_) live.push_back(operation);
  for (const auto& [operation, client] : value_clients_) live.push_back(operation);
  for (const auto operation : live) end_operation(operation, why, to_sessions);
  for (const auto& [transfer, session] : sessions_) {
    if (session.operation == operation_id{}) tell_session(transfer, to_sessions);
  }
  drop_parked([&](const parked_request& one) {
    refuse_request(one.link, one.request.transfer, why);
    return true;
  });
  // No lease is left, so cancel the timer: a pending one would keep the runner's actor alive.
  if (lease_beat_) forget_deadline(*lease_beat_, timer::leases, 0);
  lease_beat_.reset();
  context_->counters.runner_stops.store(true);
}

void operation_runner::parked_too_long(transfer_id transfer) {
  const auto time = around_.now();
  drop_parked_of(transfer, [&](const parked_request& one) {
    if (one.until > time) return false;  // another peer chose the same id
    const troupe::error late{errc::deadline, "no prefill engine offered request `" +
                                                 one.request.request + "` here in time"};
    refuse_request(one.link, transfer,
                   one.until < one.deadline ? not_offered(one.request.request) : late);
    return true;
  });
}

void operation_runner::deadline_passed(timer what, std::uint64_t id) {
  switch (what) {
    case timer::operation: {
      const operation_id operation{id};
      const auto src = sources_.find(operation);
      std::string sentence = "the deadline passed";
      if (src != sources_.end() && src->second.senders().empty()) {
        sentence += " and no decode rank asked for request `" + src->second.spec().request + "`";
      }
      // A sender's own deadline is its decode rank's, which may be later: do not wait for that.
      const troupe::error why = src != sources_.end() && src->second.lost()
                                    ? *src->second.lost()
                                    : troupe::error{errc::deadline, sentence};
      end_operation(operation, why, session_event{abort_session{why}});
      return;
    }
    case timer::session: tell_session(transfer_id{id}, session_event{deadline_reached{}}); return;
    case timer::parked: parked_too_long(transfer_id{id}); return;
    case timer::leases: lease_beat(); return;
  }
}

void operation_runner::tick() {
  ticking_ = false;
  const auto time = around_.now();
  while (!deadlines_.empty() && std::get<time_point>(*deadlines_.begin()) <= time) {
    const auto [when, what, id] = *deadlines_.begin();
    deadlines_.erase(deadlines_.begin());
    deadline_passed(what, id);
  }
  arm();
}

transfer_reports operation_runner::report() const {
  transfer_reports all;
  for (const auto& [peer, line] : waiting_for_link_) all.waiting_for_link += line.waiting.size();
  const auto time = around_.now();
  for (const auto& [transfer, session] : sessions_) {
    auto report = session.report;
    report.age_ms = static_cast<std::uint32_t>(
        std::chrono::duration_cast<std::chrono::milliseconds>(time - session.started).count());
    all.transfers.push_back(std::move(report));
  }
  for (const auto& [transfer, hold] : holds_) {
    const auto source = sources_.find(hold.source);
    if (source == sources_.end()) continue;
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
  for (const auto& [peer, count] : parked_of_) all.parked.push_back({peer, count});
  return all;
}

/// A crashed session no longer counts for the bounds on transfers, nor for those who wait for their
/// end.
void operation_runner::count_as_crashed(live_session& session) {
  session.report.state = "crashed";
  if (!std::exchange(session.crashed, true)) ++crashed_sessions_;
  if (std::exchange(session.served, false)) --served_count_;
  count_sessions();
}

/// A link's actor ended. Sessions that it never knew get no answer from it: it granted nothing for
/// them, so none of their bytes can move. After a crash of the link nothing is known; the pins
/// stay.
void operation_runner::on_link_ended(std::uint64_t link, bool crashed) {
  watched_links_.erase(link);
  // A link that crashed has not said that it is gone: the next operation needs another one.
  std::erase_if(links_, [&](const auto& known) {
    if (known.second.id != link) return false;
    leases_.unlinked(known.second.peer_incarnation);
    return true;
  });
  drop_parked([&](const parked_request& one) { return one.link.id == link; });
  end_holds_over(link);
  for (auto& [transfer, session] : sessions_) {
    if (session.link.id != link) continue;
    if (crashed) count_as_crashed(session);
    tell_session(transfer,
                 session_event{link_is_lost{
                     {errc::peer_lost, "the link to " + session.report.peer + " is gone"}}});
    if (!crashed) {
      tell_session(transfer, session_event{transfer_fenced{}});
    } else if (session.owed) {
      lose_value(session.operation, take_owed(session));
    } else if (value_clients_.erase(session.operation) != 0) {
      // Its client would wait for the fence.
      lose_value(session.operation,
                 in_doubt({errc::peer_lost,
                           "the actor of the link to " + session.report.peer + " crashed"}));
    }
  }
}

/// A session's actor crashed by a defect of ours. Its operation fails. Another session fences the
/// transfer in its place: until then its blocks stay pinned, and the rest of what its bytes may touch
/// stays in place.
void operation_runner::on_session_crashed(transfer_id transfer, const std::string& why) {
  const auto found = sessions_.find(transfer);
  if (found == sessions_.end()) return;
  auto& crashed = found->second;
  logger("operations")
      ->error(
          "transfer {:016x} request {}: its actor crashed ({}); its blocks stay pinned until "
          "nothing can touch them any more",
          transfer.value, crashed.report.request, why);
  if (crashed.replaced) {
    if (crashed.owed) lose_value(crashed.operation, take_owed(crashed));
    return;
  }
  // A link that ended in good order has left nothing to fence; one that crashed cannot fence.
  const bool link_crashed = crashed.crashed;
  const bool link_ended = !watched_links_.contains(crashed.link.id);
  count_as_crashed(crashed);
  if (!link_ended) {
    crashed.replaced = true;
    crashed.actor = around_.begin_session(transfer, crashed.link,
                                          std::make_unique<session_fence>(crashed.link, transfer));
  }
  fail_crashed(crashed, transfer);
  if (link_ended && !link_crashed) {
    session_unpinned last{transfer};
    on_session_unpinned(last);
  }
}

/// Fails the operation of a crashed session, at both sides.
void operation_runner::fail_crashed(live_session& session, transfer_id transfer) {
  const troupe::error told{errc::internal, "the actor of the transfer crashed; see the log"};
  // Without this the other side would wait until its deadline.
  const auto link = links_.find(session.report.peer);
  if (link != links_.end() && link->second.id == session.link.id) {
    refuse_request(link->second, transfer, told);
  }
  const auto operation = session.operation;
  // Only a value's own actor knows its outcome.
  if (value_clients_.erase(operation) != 0) {
    close_values(*context_);
    if (session.lends) {
      session.owed = in_doubt(told);  // the outcome returns the memory to the caller
    } else {
      value_concluded outcome{operation, event_failed{in_doubt(told)}};
      value_outcome(outcome);
    }
  } else if (const auto src = sources_.find(operation); src != sources_.end()) {
    if (src->second.concluded) return;
    leases_.leave(operation, transfer, around_.now());
    rank_failed(operation, transfer, told);
  } else {
    end_operation(operation, told, session_event{abort_session{told}});
  }
}

void operation_runner::handle(engine_command& command) {
  std::visit(overloaded{[this](start_send& x) { on_start_send(x); },
                        [this](send_grew& x) { on_send_grew(x); },
                        [this](send_progress& x) { on_send_progress(x); },
                        [this](send_sealed& x) { on_send_sealed(x); },
                        [this](start_receive& x) { on_start_receive(x); },
                        [this](open_when_complete& x) { on_open_when_complete(x); },
                        [this](abort_operation& x) { on_abort_operation(x); },
                        [this](start_value& x) { on_start_value(x); },
                        [this](start_word& x) { on_start_word(x); },
                        [this](connect_operations& x) { around_.connect(x); },
                        [this](stop_runner&) { on_stop_runner(); }},
             command.what);
  arm();
}

void operation_runner::handle(runner_event& event) {
  std::visit(overloaded{[this](link_ready& x) { on_link_ready(x); },
                        [this](link_draining& x) { on_link_draining(x); },
                        [this](link_gone& x) { on_link_gone(x); },
                        [this](unrouted_message& x) { on_unrouted_message(x); },
                        [this](session_layers& x) { on_session_layers(x); },
                        [this](session_concluded& x) { on_session_concluded(x); },
                        [this](session_unpinned& x) { on_session_unpinned(x); },
                        [this](value_concluded& x) { on_value_concluded(x); },
                        [this](blocks_granted& x) { on_blocks_granted(x); },
                        [this](gpu_point_reached& x) { on_gpu_point_reached(x); }},
             event.what);
  arm();
}

void operation_runner::handle(node_notice& notice) {
  std::visit(overloaded{[this](membership_changed& x) { on_membership_changed(x); },
                        [this](heartbeat_answered& x) { on_heartbeat_answered(x); }},
             notice.what);
  arm();
}

}  // namespace troupe::actors::operations
