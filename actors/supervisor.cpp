#include "troupe/actors/supervisor.hpp"

#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>

#include <caf/actor_system.hpp>
#include <caf/stateful_actor.hpp>
#include <caf/typed_event_based_actor.hpp>

#include "troupe/actors/logging.hpp"
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

struct supervisor_state;
using self_pointer = supervisor_actor::stateful_pointer<supervisor_state>;

struct supervisor_state {
  static inline const char* name = "supervisor";

  struct peer {
    node_actor handle;
    std::uint64_t incarnation{0};
  };
  struct pending_placement {
    placement_promise promise;
    std::string request;
  };

  self_pointer self{nullptr};
  std::optional<membership_table> table;
  std::optional<router> routes;
  std::chrono::milliseconds tick_interval{50};
  std::map<std::string, peer> peers;  ///< nodes that are told of changes
  std::set<std::string> uninformed;   ///< registered since the last broadcast
  std::unordered_map<ticket_id, pending_placement> waiting;
  log_limiter refusals;
  log_limiter moves;
  std::shared_ptr<spdlog::logger> log = logger("supervisor");

  void start(self_pointer me, supervisor_options options);
  [[nodiscard]] steady_time now() const { return self->clock().now(); }

  // -- messages

  registration take_in(const registration_request& request, const node_actor& handle);
  heartbeat_ack heard(const heartbeat& beat);
  void place(const placement_request& request, placement_promise promise);
  void node_ended(const caf::down_msg& down);
  void tick();
  void stop();

  // -- what follows from them

  void settle();
  void report(const node_transition& change);
  void report(const placement& where);
  void deliver(std::vector<served_ticket> served);
  void broadcast();
  void forget_peer(const std::string& node);
};

void supervisor_state::start(self_pointer me, supervisor_options options) {
  self = me;
  if (options.members.supervisor_incarnation == 0) {
    options.members.supervisor_incarnation = draw_incarnation();
  }
  options.routes.slots = options.members.slots;
  tick_interval = options.tick;
  log->info(
      "supervisor of cluster '{}' (incarnation {:016x}) expects {} nodes, heartbeats every {} "
      "ms, down after {} ms",
      options.members.cluster, options.members.supervisor_incarnation, options.members.slots.size(),
      options.members.heartbeat_interval.count(), options.members.heartbeat_timeout.count());
  table.emplace(std::move(options.members));
  routes.emplace(std::move(options.routes));
}

registration supervisor_state::take_in(const registration_request& request,
                                       const node_actor& handle) {
  result<registration> outcome =
      handle ? table->registered(request, now())
             : fail(errc::invalid_config, "node " + quoted(request.node.name) +
                                              " registers without a handle to reach it by");
  if (!outcome) {
    if (const auto held_back = refusals.pass()) {
      log->warn("refused a registration, {} ({} more since the last such line)",
                to_string(outcome.error()), *held_back);
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
  peers[node] = {handle, request.node.incarnation};
  uninformed.insert(node);
  log->info("{} (incarnation {:016x}, pid {}) registers from {}:{} as replica {} of stage {}", node,
            request.node.incarnation, request.node.pid, quoted(request.node.host),
            request.node.port, outcome->replica, request.node.stage);
  return std::move(*outcome);
}

heartbeat_ack supervisor_state::heard(const heartbeat& beat) {
  const auto verdict = table->heard(beat, now());
  switch (verdict) {
    case heartbeat_verdict::known: routes->load(beat.name, beat.incarnation, beat.load); break;
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
    log->info("request {} not placed, {}", quoted(request.request), to_string(outcome.error()));
    promise.deliver(failed_placement(request.request, outcome.error()));
  } else if (auto* placed = std::get_if<placement>(&*outcome)) {
    report(*placed);
    promise.deliver(std::move(*placed));
  } else {
    waiting[std::get<ticket_id>(*outcome)] = {std::move(promise), request.request};
  }
}

void supervisor_state::node_ended(const caf::down_msg& down) {
  for (const auto& [node, p] : peers) {
    if (p.handle.address() != down.source) continue;
    const std::string gone = node;
    table->connection_lost(gone, p.incarnation, self->system().render(down.reason), now());
    peers.erase(gone);
    uninformed.erase(gone);
    return;
  }
}

void supervisor_state::tick() {
  table->tick(now());
  settle();
  deliver(routes->serve(now()));
}

void supervisor_state::stop() {
  deliver(routes->abandon());
  log->info("supervisor of cluster '{}' stops at epoch {}", table->options().cluster,
            table->epoch());
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
  broadcast();
}

void supervisor_state::report(const node_transition& change) {
  const auto from = change.from ? to_string(*change.from) : std::string_view{"absent"};
  const bool in_order = change.from == node_state::leaving;
  const bool lost = change.to == node_state::down || change.to == node_state::suspect;
  const auto level = lost && !in_order ? spdlog::level::warn : spdlog::level::info;
  log->log(level, "{} (incarnation {:016x}) {} -> {}, epoch {}: {}", change.name,
           change.incarnation, from, to_string(change.to), change.epoch, change.reason);
  if (change.to != node_state::down) return;
  const auto it = peers.find(change.name);
  if (it == peers.end() || it->second.incarnation != change.incarnation) return;
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

void supervisor_state::deliver(std::vector<served_ticket> served) {
  for (served_ticket& s : served) {
    const auto it = waiting.find(s.ticket);
    if (it == waiting.end()) continue;
    if (s.outcome) {
      report(*s.outcome);
      it->second.promise.deliver(std::move(*s.outcome));
    } else {
      log->info("request {} not placed, {}", quoted(it->second.request),
                to_string(s.outcome.error()));
      it->second.promise.deliver(failed_placement(it->second.request, s.outcome.error()));
    }
    waiting.erase(it);
  }
}

void supervisor_state::broadcast() {
  if (const auto members = table->take_broadcast(now())) {
    for (const auto& [node, p] : peers) self->send(p.handle, members_atom_v, *members);
    uninformed.clear();
    log->debug("membership of epoch {} told to {} nodes", members->epoch, peers.size());
    return;
  }
  // A node that registered again without changing anything still has to learn the list.
  for (const std::string& node : std::exchange(uninformed, {})) {
    if (const auto it = peers.find(node); it != peers.end()) {
      self->send(it->second.handle, members_atom_v, table->view());
    }
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
      [](drain_atom, const drain_request&) { return drain_reply{}; },
      [](events_atom, const event_query&) { return event_page{}; },
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
