#include "troupe/actors/supervisor.hpp"

#include <algorithm>
#include <chrono>
#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>

#include <caf/actor_system.hpp>
#include <caf/exit_reason.hpp>
#include <caf/stateful_actor.hpp>
#include <caf/typed_event_based_actor.hpp>
#include <spdlog/fmt/fmt.h>

#include "troupe/actors/drains.hpp"
#include "troupe/actors/event_log.hpp"
#include "troupe/actors/list_pace.hpp"
#include "troupe/actors/logging.hpp"
#include "troupe/actors/slot_claims.hpp"
#include "troupe/actors/system.hpp"

namespace troupe::actors {

namespace {

using placement_promise = caf::typed_response_promise<placement>;

placement failed_placement(const std::string& request, const error& e) {
  placement out;
  out.failed = static_cast<std::uint8_t>(e.code);
  out.sentence = e.message;
  out.request = request;
  return out;
}

/// What a rate limit held back, behind the sentence that passed.
std::string more_of(std::uint64_t held_back) {
  return held_back == 0 ? ""
                        : " (" + std::to_string(held_back) + " more since the last such event)";
}

struct supervisor_state;
using self_pointer = supervisor_actor::stateful_pointer<supervisor_state>;

struct supervisor_state {
  static inline const char* name = "supervisor";

  struct peer {
    node_actor handle;
    std::uint64_t incarnation{0};
    std::string arrival;  ///< from where it registered, and as what
  };
  struct pending_placement {
    placement_promise promise;
    std::string request;
  };

  self_pointer self{nullptr};
  std::optional<membership_table> table;
  std::optional<router> routes;
  std::optional<slot_claims> claims;
  drain_list drains;
  std::chrono::milliseconds tick_interval{50};
  std::map<std::string, peer> peers;  ///< nodes that are told of changes
  std::set<std::string> uninformed;   ///< who have not been sent the newest list
  std::string told_last;              ///< of the nodes that were sent one
  struct {
    std::uint64_t epoch{0};
    std::size_t entries{0};
    caf::message message;
  } told;  ///< the last list
  list_pace pace;
  std::shared_ptr<membership_store> store;
  std::uint64_t saved{0};  ///< epoch of the last record that the store was given
  steady_time saved_at{};
  std::unordered_map<ticket_id, pending_placement> waiting;
  event_log events;
  log_limiter refusals;
  log_limiter moves;
  log_limiter refused_registrations;
  log_limiter unplaced_requests;
  std::shared_ptr<spdlog::logger> log = logger("supervisor");

  void start(self_pointer me, supervisor_options options);
  [[nodiscard]] steady_time now() const { return self->clock().now(); }

  // -- messages

  result<registration> register_node(const registration_request& request, const node_actor& handle);
  registration take_in(const registration_request& request, const node_actor& handle);
  heartbeat_ack heard(const heartbeat& beat);
  void place(const placement_request& request, placement_promise promise);
  drain_reply drain(const drain_request& request);
  drain_reply cancel_drain(const std::string& node);
  slot_grant claim(const slot_claim& claim);
  void node_ended(const caf::down_msg& down);
  void tick();
  void stop();

  // -- what follows from them

  void note(std::string what, std::string node, std::uint64_t incarnation, std::uint64_t epoch,
            std::string text, spdlog::level::level_enum level = spdlog::level::info);
  void not_placed(const std::string& request, const error& why);
  void settle();
  void report(const node_transition& change);
  void report(const placement& where);
  void judge_drains();
  void order(const std::string& node, const drain_order& what);
  void deliver(std::vector<served_ticket> served);
  void broadcast();
  void restore();
  void keep(steady_time now);
  void forget_peer(const std::string& node);
  [[nodiscard]] std::string why_lost(const caf::error& reason) const;
};

void supervisor_state::start(self_pointer me, supervisor_options options) {
  self = me;
  if (options.members.supervisor_incarnation == 0) {
    options.members.supervisor_incarnation = draw_incarnation();
  }
  options.routes.slots = options.members.slots;
  tick_interval = options.tick;
  const membership_options& members = options.members;
  note("started", "supervisor", members.supervisor_incarnation, 0,
       fmt::format("cluster {} expects {} nodes, heartbeats every {} ms, down after {} ms",
                   members.cluster, members.slots.size(), members.heartbeat_interval.count(),
                   members.heartbeat_timeout.count()));
  claims.emplace(members.cluster, members.slots, members.heartbeat_timeout);
  table.emplace(std::move(options.members));
  store = std::move(options.store);
  routes.emplace(std::move(options.routes));
  restore();
}

/// Goes on where the supervisor before this one ended.
void supervisor_state::restore() {
  if (!store || !store->found()) {
    claims->opens_at(now() + table->options().heartbeat_timeout);
    return;
  }
  const auto& left = *store->found();
  table->restore(left, now());
  routes->remember(left.epoch_limit);
  note("restored", "supervisor", table->options().supervisor_incarnation, left.epoch_limit,
       fmt::format("goes on from epoch {} with {} nodes of {}", left.epoch_limit, left.nodes.size(),
                   store->path()));
}

/// What must survive goes to the store: at once, but at most ten times a second.
void supervisor_state::keep(steady_time now) {
  constexpr auto interval = std::chrono::milliseconds{100};
  if (!store || saved == table->epoch() || now - saved_at < interval) return;
  saved = table->epoch();
  saved_at = now;
  store->save(table->record());
}

result<registration> supervisor_state::register_node(const registration_request& request,
                                                     const node_actor& handle) {
  const node_info& node = request.node;
  if (!handle) {
    return fail(errc::invalid_config,
                "node " + quoted(node.name) + " registers without a handle to reach it by");
  }
  if (auto claimed = claims->refusal(node.name, node.incarnation, now()))
    return fail(std::move(*claimed));
  auto outcome = table->registered(request, now());
  if (outcome) claims->registered(node.name, node.incarnation);
  return outcome;
}

registration supervisor_state::take_in(const registration_request& request,
                                       const node_actor& handle) {
  result<registration> outcome = register_node(request, handle);
  if (!outcome) {
    if (const auto held_back = refused_registrations.pass(now())) {
      note("refused", request.node.name, request.node.incarnation, table->epoch(),
           to_string(outcome.error()) + more_of(*held_back), spdlog::level::warn);
    }
    registration refused;
    refused.failed = static_cast<std::uint8_t>(outcome.error().code);
    refused.sentence = outcome.error().message;
    refused.supervisor_incarnation = table->options().supervisor_incarnation;
    return refused;
  }
  const std::string& node = request.node.name;
  if (const auto it = peers.find(node); it == peers.end() || it->second.handle != handle) {
    forget_peer(node);
    self->monitor(handle);
  }
  peers[node] = {
      handle, request.node.incarnation,
      fmt::format("from {} port {} (pid {}) as replica {} of stage {}", quoted(request.node.host),
                  request.node.port, request.node.pid, outcome->replica, request.node.stage)};
  uninformed.insert(node);
  if (const auto drained = drains.registered(node, request.node.incarnation)) {
    order(node, *drained);
  }
  return std::move(*outcome);
}

heartbeat_ack supervisor_state::heard(const heartbeat& beat) {
  const auto verdict = table->heard(beat, now());
  switch (verdict) {
    case heartbeat_verdict::known:
      routes->load(beat.name, beat.incarnation, beat.load);
      if (beat.failure.empty()) drains.heard(beat);  // else its load says nothing
      break;
    case heartbeat_verdict::unknown:
    case heartbeat_verdict::stale:
      if (const auto held_back = refusals.pass()) {
        log->info(
            "heartbeat of {} (incarnation {:016x}), which is {} here: told to register again "
            "({} more since the last such line)",
            quoted(beat.name), beat.incarnation,
            verdict == heartbeat_verdict::stale ? "replaced" : "unknown", *held_back);
      }
      break;
  }
  return table->ack(verdict);
}

void supervisor_state::place(const placement_request& request, placement_promise promise) {
  auto outcome = routes->place(request, now());
  if (!outcome) {
    not_placed(request.request, outcome.error());
    promise.deliver(failed_placement(request.request, outcome.error()));
  } else if (auto* placed = std::get_if<placement>(&*outcome)) {
    report(*placed);
    promise.deliver(std::move(*placed));
  } else {
    waiting[std::get<ticket_id>(*outcome)] = {std::move(promise), request.request};
  }
}

/// The whole replica drains: without one of its ranks it takes no requests anyway.
drain_reply supervisor_state::drain(const drain_request& request) {
  if (request.cancel != 0) return cancel_drain(request.name);
  const auto refused = [](const error& why) {
    return drain_reply{static_cast<std::uint8_t>(why.code), why.message, 0};
  };
  const auto asked = table->drain(request.name);
  if (!asked) return refused(asked.error());
  const auto& slots = table->options().slots;
  const auto named = std::ranges::find(slots, request.name, &expected_slot::name);
  std::vector<drain_list::rank> ranks{{request.name, *asked}};
  for (const expected_slot& slot : slots) {
    if (slot.stage != named->stage || slot.replica != named->replica) continue;
    if (slot.name == request.name) continue;
    if (const auto life = table->drain(slot.name)) ranks.push_back({slot.name, *life});
  }
  const std::chrono::milliseconds deadline{request.deadline_ms};
  drains.begin(named->stage, named->replica, ranks, deadline, now());
  for (const member& m : table->view().members) {
    // Busy is what it said last; that it is quiet it has to say anew.
    const bool busy = m.load.queue_length != 0 || m.load.active_transfers != 0;
    if (busy) drains.heard({m.node.name, m.node.incarnation, 0, m.load, {}});
  }
  std::string names;
  for (const auto& one : ranks) {
    names += (names.empty() ? "" : ", ") + one.name;
    order(one.name, {one.incarnation, 0});
  }
  log->info("an operator drains {}: no new request goes there, it leaves in {} ms at the latest",
            names, std::min(deadline, max_drain_deadline).count());
  judge_drains();
  return {0, names, *asked};
}

/// The whole replica serves on, as it drained.
drain_reply supervisor_state::cancel_drain(const std::string& node) {
  const auto serving = table->cancel_drain(node, now());
  if (!serving)
    return {static_cast<std::uint8_t>(serving.error().code), serving.error().message, 0};
  const auto& slots = table->options().slots;
  const auto named = std::ranges::find(slots, node, &expected_slot::name);
  drains.cancel(named->stage, named->replica);
  std::string names;
  for (const node_life& one : *serving) {
    names += (names.empty() ? "" : ", ") + one.name;
    order(one.name, {one.incarnation, 2});
  }
  log->info("an operator cancels the drain of {}: requests go there again", names);
  return {0, names, table->incarnation_of(node).value_or(0)};
}

slot_grant supervisor_state::claim(const slot_claim& claim) {
  auto granted = claims->claim(claim, table->uses(now()), now());
  if (!granted) {
    // Who asks again and again until one is free would fill the log.
    log->debug("a process of pid {} on {} gets no name: {}", claim.pid, quoted(claim.host),
               to_string(granted.error()));
    return {static_cast<std::uint8_t>(granted.error().code), granted.error().message, {}, 0};
  }
  log->info("{} is claimed by pid {} on {} (incarnation {:016x}), held for it for {} ms",
            granted->name, claim.pid, quoted(claim.host), claim.incarnation, granted->held_ms);
  return std::move(*granted);
}

/// CAF names what ended an actor; the commonest end is said in words.
std::string supervisor_state::why_lost(const caf::error& reason) const {
  if (reason == caf::exit_reason::remote_link_unreachable)
    return "its process is gone, or the connection to it";
  return self->system().render(reason);
}

void supervisor_state::node_ended(const caf::down_msg& down) {
  for (const auto& [node, p] : peers) {
    if (p.handle.address() != down.source) continue;
    const std::string gone = node;
    table->connection_lost(gone, p.incarnation, why_lost(down.reason), now());
    peers.erase(gone);
    uninformed.erase(gone);
    return;
  }
}

void supervisor_state::tick() {
  table->tick(now());
  judge_drains();
  settle();
  deliver(routes->serve(now()));
}

void supervisor_state::stop() {
  deliver(routes->abandon());
  if (store) {
    store->save(table->record());
    store->close();
  }
  note("stopped", "supervisor", table->options().supervisor_incarnation, table->epoch(),
       "was told to end");
}

/// Something happened that people want to know: kept for `troupe events`, and logged.
void supervisor_state::note(std::string what, std::string node, std::uint64_t incarnation,
                            std::uint64_t epoch, std::string text,
                            spdlog::level::level_enum level) {
  const auto wall = std::chrono::duration_cast<std::chrono::milliseconds>(
      std::chrono::system_clock::now().time_since_epoch());
  cluster_event event;
  event.unix_ms = static_cast<std::uint64_t>(wall.count());
  event.what = std::move(what);
  event.node = std::move(node);
  event.incarnation = incarnation;
  event.epoch = epoch;
  event.text = std::move(text);
  log->log(level, "{}", event_line(events.add(std::move(event))));
}

void supervisor_state::not_placed(const std::string& request, const error& why) {
  if (const auto held_back = unplaced_requests.pass(now())) {
    note("unplaced", {}, 0, table->epoch(),
         "request " + quoted(request) + ": " + to_string(why) + more_of(*held_back));
  }
}

/// After every event: log what changed, place who can be placed now, tell the nodes.
void supervisor_state::settle() {
  const auto changes = table->take_transitions();
  for (const node_transition& change : changes) report(change);
  if (!changes.empty()) {
    routes->update(table->view(), now());
    for (const std::string& note : routes->take_notes()) log->info("{}", note);
    deliver(routes->serve(now()));
  }
  keep(now());
  broadcast();
}

void supervisor_state::report(const node_transition& change) {
  const bool in_order = change.from == node_state::leaving &&
                        (change.reason == "left" || change.reason == drained_reason);
  const bool lost = change.to == node_state::down || change.to == node_state::suspect;
  const auto level = lost && !in_order ? spdlog::level::warn : spdlog::level::info;
  const auto it = peers.find(change.name);
  const bool reachable = it != peers.end() && it->second.incarnation == change.incarnation;
  const bool arrives = change.to == node_state::joining && reachable;
  note(std::string{to_string(change.to)}, change.name, change.incarnation, change.epoch,
       arrives ? change.reason + " " + it->second.arrival : change.reason, level);
  if (change.to != node_state::down) return;
  drains.lost(change.name, change.incarnation);
  if (!reachable || table->reports_failure(change.name)) return;
  // It is silent, yet its connection stands: should it wake up, this is the first thing it reads.
  self->send(it->second.handle, rejoin_atom_v);
  forget_peer(change.name);
}

/// A placement says something when an affinity had to leave its replica.
void supervisor_state::report(const placement& where) {
  if (where.sentence.empty()) return;
  if (const auto held_back = moves.pass()) {
    log->info("request {}: {} ({} more since the last such line)", quoted(where.request),
              where.sentence, *held_back);
  } else {
    log->debug("request {}: {}", quoted(where.request), where.sentence);
  }
}

void supervisor_state::judge_drains() {
  const auto unfinished = [this](std::string_view stage, std::uint32_t replica) {
    return routes->unfinished(stage, replica);
  };
  for (const auto& verdict : drains.judge(unfinished, now())) {
    for (const auto& [node, incarnation] : verdict.ranks) {
      if (!verdict.leave) {
        table->draining(node, incarnation, verdict.reason);
        continue;
      }
      table->drained(node, incarnation, verdict.reason);
      const auto level =
          verdict.reason == drained_reason ? spdlog::level::info : spdlog::level::warn;
      note("drained", node, incarnation, table->epoch(), verdict.reason, level);
      order(node, {incarnation, 1});
    }
  }
}

/// To the life that is meant only: another one never sees it.
void supervisor_state::order(const std::string& node, const drain_order& what) {
  const auto it = peers.find(node);
  if (it == peers.end() || it->second.incarnation != what.incarnation) return;
  self->send(it->second.handle, drain_atom_v, what);
}

void supervisor_state::deliver(std::vector<served_ticket> served) {
  for (served_ticket& s : served) {
    const auto it = waiting.find(s.ticket);
    if (it == waiting.end()) continue;
    if (s.outcome) {
      report(*s.outcome);
      it->second.promise.deliver(std::move(*s.outcome));
    } else {
      not_placed(it->second.request, s.outcome.error());
      it->second.promise.deliver(failed_placement(it->second.request, s.outcome.error()));
    }
    waiting.erase(it);
  }
}

/// A list goes to as many nodes at once as its length allows, and to the others with the next ticks:
/// heartbeats are read in between, by the thread that writes the lists.
void supervisor_state::broadcast() {
  if (auto list = table->take_broadcast(now())) {
    log->debug("membership of epoch {} goes to {} nodes", list->epoch, peers.size());
    told = {list->epoch, list->members.size(), caf::make_message(members_atom_v, *std::move(list))};
    for (const auto& [node, p] : peers) uninformed.insert(node);
  }
  if (uninformed.empty() || !pace.may_tell(now())) return;
  // A node that registered again without changing anything still has to learn the list as it is.
  if (told.epoch != table->epoch()) {
    auto list = table->view();
    told = {list.epoch, list.members.size(), caf::make_message(members_atom_v, std::move(list))};
  }
  while (!uninformed.empty() && pace.may_tell(now())) {
    told_last = take_next(uninformed, told_last);
    const auto it = peers.find(told_last);
    if (it == peers.end()) continue;
    pace.tells(told.entries);
    // One message for all of them, not a list for each.
    const auto to = caf::actor_cast<caf::strong_actor_ptr>(it->second.handle);
    to->enqueue(self->ctrl(), caf::make_message_id(), told.message, self->context());
  }
}

void supervisor_state::forget_peer(const std::string& node) {
  const auto it = peers.find(node);
  if (it == peers.end()) return;
  self->demonitor(it->second.handle.address());
  peers.erase(it);
  uninformed.erase(node);
}

supervisor_actor::behavior_type supervisor(self_pointer self, supervisor_options options) {
  set_log_handlers(*self, "supervisor");
  self->state.start(self, std::move(options));
  self->set_down_handler([self](caf::down_msg& down) {
    self->state.node_ended(down);
    self->state.settle();
  });
  self->set_exit_handler([self](caf::exit_msg& message) {
    self->state.stop();
    self->quit(std::move(message.reason));
  });
  self->send(self, tick_atom_v);
  return {
      [self](register_atom, const registration_request& request, const node_actor& handle) {
        auto promise = self->make_response_promise<registration>();
        promise.deliver(
            self->state.take_in(request, handle));  // before the membership that follows
        self->state.settle();
        return promise;
      },
      [self](const heartbeat& beat) {
        auto ack = self->state.heard(beat);
        self->state.settle();
        return ack;
      },
      [self](leave_atom, const std::string& name, std::uint64_t incarnation) {
        self->state.table->leave(name, incarnation, self->state.now());
        self->state.settle();
      },
      [self](place_atom, const placement_request& request) {
        auto promise = self->make_response_promise<placement>();
        self->state.place(request, promise);
        return promise;
      },
      [self](placed_atom, const std::string& request) { self->state.routes->finished(request); },
      [self](members_atom) { return self->state.table->view(); },
      [self](drain_atom, const drain_request& request) {
        auto reply = self->state.drain(request);
        self->state.settle();
        return reply;
      },
      [self](claim_atom, const slot_claim& claim) { return self->state.claim(claim); },
      [self](events_atom, const event_query& query) {
        const auto& st = self->state;
        return st.events.page(query, st.table->options().supervisor_incarnation);
      },
      [self](tick_atom) {
        // Anyone can send this message; only the supervisor's own keeps the clock going.
        if (self->current_sender() != self->ctrl()) return;
        self->state.tick();
        self->delayed_send(self, self->state.tick_interval, tick_atom_v);
      },
  };
}

}  // namespace

supervisor_actor spawn_supervisor(caf::actor_system& system, supervisor_options options) {
  return system.spawn(supervisor, std::move(options));
}

}  // namespace troupe::actors
