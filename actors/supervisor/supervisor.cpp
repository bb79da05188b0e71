#include "troupe/actors/supervisor/supervisor.hpp"

#include <chrono>
#include <string>
#include <utility>

#include <caf/actor_system.hpp>
#include <caf/stateful_actor.hpp>
#include <spdlog/fmt/fmt.h>

#include "troupe/actors/runtime/system.hpp"
#include "troupe/actors/supervisor/supervisor_parts.hpp"

namespace troupe::actors::supervisor_parts {

std::string more_of(std::uint64_t held_back) {
  return held_back == 0 ? ""
                        : " (" + std::to_string(held_back) + " more since the last such event)";
}

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
  nodes_there = std::move(options.nodes_there);
  claims_asked = std::move(options.claims_asked);
  routes.emplace(std::move(options.routes));
  restore();
}

/// Goes on where the previous supervisor ended.
void supervisor_state::restore() {
  if (!store || !store->found()) {
    claims->opens_at(now() + table->options().heartbeat_timeout);
    return;
  }
  const auto& left = *store->found();
  table->restore(left, now());
  routes->remember(left.epoch_limit);
  count_nodes();
  note("restored", "supervisor", table->options().supervisor_incarnation, left.epoch_limit,
       fmt::format("goes on from epoch {} with {} nodes of {}", left.epoch_limit, left.nodes.size(),
                   store->path()));
}

/// Gives the store a new record at once, but at most ten times a second.
void supervisor_state::keep(steady_time now) {
  constexpr auto interval = std::chrono::milliseconds{100};
  if (!store || saved == table->epoch() || now - saved_at < interval) return;
  saved = table->epoch();
  saved_at = now;
  store->save(table->record());
}

void supervisor_state::count_nodes() {
  if (nodes_there) *nodes_there = table->nodes_there();
}

void supervisor_state::forgive_standstill() {
  const auto gap = table->stood_still(now());
  if (gap.count() > 0) claims->stood_still(gap, now());
}

void supervisor_state::tick() {
  forgive_standstill();
  table->tick(now());
  judge_drains();
  act_on_changes();
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

void supervisor_state::act_on_changes() {
  const auto changes = table->take_transitions();
  for (const node_transition& change : changes) report(change);
  if (!changes.empty()) {
    count_nodes();
    routes->update(table->view(), now());
    for (const std::string& note : routes->take_notes()) log->info("{}", note);
    deliver(routes->serve(now()));
  }
  keep(now());
  broadcast();
}

}  // namespace troupe::actors::supervisor_parts

namespace troupe::actors {

namespace {

supervisor_actor::behavior_type supervisor(supervisor_parts::self_pointer self,
                                           supervisor_options options) {
  set_log_handlers(*self, "supervisor");
  self->state.start(self, std::move(options));
  self->set_down_handler([self](caf::down_msg& down) {
    self->state.node_ended(down);
    self->state.act_on_changes();
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
        self->state.act_on_changes();
        return promise;
      },
      [self](const heartbeat& beat) {
        auto ack = self->state.heard(beat);
        self->state.act_on_changes();
        return ack;
      },
      [self](leave_atom, const std::string& name, std::uint64_t incarnation) {
        self->state.table->leave(name, incarnation, self->state.now());
        self->state.act_on_changes();
      },
      [self](place_atom, const placement_request& request) {
        auto promise = self->make_response_promise<placement>();
        self->state.place(request, promise);
        return promise;
      },
      [self](placed_request_ended_atom, const std::string& request) {
        self->state.routes->finished(request);
      },
      [self](members_atom) { return self->state.table->view(); },
      [self](drain_atom, const drain_request& request) {
        auto reply = self->state.drain(request);
        self->state.act_on_changes();
        return reply;
      },
      [self](lease_name_atom, const name_request& claim) { return self->state.claim(claim); },
      [self](events_atom, const event_query& query) {
        const auto& st = self->state;
        return st.events.page(query, st.table->options().supervisor_incarnation);
      },
      [self](tick_atom) {
        // Anyone can send this message; only the supervisor's own tick keeps the clock going.
        if (self->current_sender() != self->ctrl()) return;
        self->state.tick();
        self->delayed_send(self, self->state.tick_interval, tick_atom_v);
      },
  };
}

}  // namespace

supervisor_actor spawn_supervisor(caf::actor_system& system, supervisor_options options) {
  const caf_thread_scope visit;
  return system.spawn(supervisor, std::move(options));
}

}  // namespace troupe::actors
