#include <string>
#include <utility>

#include <caf/actor_cast.hpp>
#include <caf/actor_system.hpp>
#include <caf/exit_reason.hpp>
#include <spdlog/fmt/fmt.h>

#include "troupe/actors/base/phrases.hpp"
#include "troupe/actors/supervisor/supervisor_parts.hpp"

namespace troupe::actors::supervisor_parts {

name_lease supervisor_state::claim(const name_request& claim) {
  if (claims_asked) ++*claims_asked;
  forgive_standstill();
  auto granted = claims->claim(claim, table->uses(now()), now());
  if (!granted) {
    // A process that keeps asking until a name is free would fill the log.
    log->debug("a process of pid {} on {} gets no name: {}", claim.pid, in_quotes(claim.host),
               to_string(granted.error()));
    return {static_cast<std::uint8_t>(granted.error().code), granted.error().message, {}, 0};
  }
  log->info("{} is claimed by pid {} on {} (incarnation {:016x}), held for it for {} ms",
            granted->name, claim.pid, in_quotes(claim.host), claim.incarnation, granted->held_ms);
  return std::move(*granted);
}

result<registration> supervisor_state::register_node(const registration_request& request,
                                                     const node_actor& handle) {
  const node_info& node = request.node;
  if (!handle) {
    return fail(errc::invalid_config,
                "node " + in_quotes(node.name) + " registers without a handle to reach it by");
  }
  forgive_standstill();
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
  peers[node] = {handle, request.node.incarnation,
                 fmt::format("from {} port {} (pid {}) as replica {} of stage {}",
                             in_quotes(request.node.host), request.node.port, request.node.pid,
                             outcome->replica, request.node.stage)};
  not_updated.insert(node);
  if (const auto drained = drains.registered(node, request.node.incarnation)) {
    // A rank that was away when the others were told to leave must leave, too.
    if (drained->step == drain_step::leave) {
      table->drained(node, request.node.incarnation, drains.why_it_leaves(node));
    }
    order(node, *drained);
  }
  return std::move(*outcome);
}

heartbeat_ack supervisor_state::heard(const heartbeat& beat) {
  const auto verdict = table->heard(beat, now());
  switch (verdict) {
    case heartbeat_verdict::known:
      routes->load(beat.name, beat.incarnation, beat.load);
      if (beat.failure.empty()) drains.heard(beat);  // the load of a failed node says nothing
      break;
    case heartbeat_verdict::unknown:
    case heartbeat_verdict::stale:
      if (const auto held_back = refusals.pass()) {
        log->info(
            "heartbeat of {} (incarnation {:016x}), which is {} here: told to register again "
            "({} more since the last such line)",
            in_quotes(beat.name), beat.incarnation,
            verdict == heartbeat_verdict::stale ? "replaced" : "unknown", *held_back);
      }
      break;
  }
  return table->ack(verdict);
}

/// Renders CAF's exit reason of an actor, the most common one in plain words.
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
    not_updated.erase(gone);
    return;
  }
}

void supervisor_state::report(const node_transition& change) {
  if (change.forgotten) {
    note("forgotten", change.name, change.incarnation, change.epoch, change.reason);
    drains.forgotten(change.name);
    return;
  }
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
  // The node is silent, yet its connection stands: if it wakes up, it reads this message first.
  self->send(it->second.handle, register_again_atom_v);
  forget_peer(change.name);
}

/// Sends a list to as many nodes at once as its length allows, and to the others with the next
/// ticks, since the thread that writes the lists also reads the heartbeats in between.
void supervisor_state::broadcast() {
  if (auto list = table->take_broadcast(now())) {
    log->debug("membership of epoch {} goes to {} nodes", list->epoch, peers.size());
    told = {list->epoch, list->members.size(), caf::make_message(members_atom_v, *std::move(list))};
    for (const auto& [node, p] : peers) not_updated.insert(node);
  }
  if (not_updated.empty() || !pace.has_room(now())) return;
  // A node that registered again without a change still has to learn the present list.
  if (told.epoch != table->epoch()) {
    auto list = table->view();
    told = {list.epoch, list.members.size(), caf::make_message(members_atom_v, std::move(list))};
  }
  while (!not_updated.empty() && pace.has_room(now())) {
    told_last = take_next(not_updated, told_last);
    const auto it = peers.find(told_last);
    if (it == peers.end()) continue;
    pace.tells(told.entries);
    // All nodes share one message, rather than a list for each.
    const auto to = caf::actor_cast<caf::strong_actor_ptr>(it->second.handle);
    to->enqueue(self->ctrl(), caf::make_message_id(), told.message, self->context());
  }
}

void supervisor_state::forget_peer(const std::string& node) {
  const auto it = peers.find(node);
  if (it == peers.end()) return;
  self->demonitor(it->second.handle.address());
  peers.erase(it);
  not_updated.erase(node);
}

}  // namespace troupe::actors::supervisor_parts
