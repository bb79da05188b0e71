#include "supervisor_life.hpp"

#include <algorithm>
#include <utility>
#include <variant>

namespace troupe::actors::cluster_simulation {

namespace {

membership_options members_of(std::uint64_t incarnation, const std::vector<expected_slot>& slots) {
  membership_options out;
  out.cluster = "simulated";
  out.supervisor_incarnation = incarnation;
  out.slots = slots;
  return out;
}

router_options routes_of(const std::vector<expected_slot>& slots, std::uint64_t seed) {
  router_options out;
  out.slots = slots;
  out.edges = {{"prefill", "decode", transfer_mode::write}};
  out.policies = {{"prefill", placement_policy::round_robin},
                  {"decode", placement_policy::least_queue_length}};
  out.seed = seed;
  return out;
}

}  // namespace

supervisor_life::supervisor_life(world& in, std::vector<expected_slot> slots,
                                 const std::optional<membership_record>& left)
    : number{++in.supervisors},
      world_{in},
      table_{members_of(incarnation = in.draw_incarnation(), slots)},
      routes_{routes_of(slots, incarnation)} {
  if (!left) return;
  table_.restore(*left, clock());
  for (const auto& node : left->nodes) replaced_.insert(node.former.begin(), node.former.end());
  last_epoch_ = in.told.epochs;
}

registration supervisor_life::take_in(const std::shared_ptr<connection>& over,
                                      const registration_request& request) {
  const std::string& name = request.node.name;
  const auto before = table_.incarnation_of(name);
  auto outcome = table_.registered(request, clock());
  if (!outcome) {
    registration refused;
    refused.failed = static_cast<std::uint8_t>(outcome.error().code);
    refused.sentence = outcome.error().message;
    return refused;
  }
  world_.require(!replaced_.contains(request.node.incarnation),
                 "a life that another one replaced was taken in again");
  if (before && *before != request.node.incarnation) replaced_.insert(*before);
  failing_.erase(request.node.incarnation);
  peers_[name] = over;
  uninformed_.insert(name);
  if (const auto drained = drains_.registered(name, request.node.incarnation)) {
    order({name, drained->incarnation}, drained->step);
  }
  return *outcome;
}

heartbeat_ack supervisor_life::heard(const heartbeat& beat) {
  const auto verdict = table_.heard(beat, clock());
  if (verdict == heartbeat_verdict::known) {
    world_.require(!replaced_.contains(beat.incarnation),
                   "a heartbeat of a life that another one replaced was believed");
    routes_.load(beat.name, beat.incarnation, beat.load);
    if (beat.failure.empty()) {
      drains_.heard(beat);
    } else {
      failing_.insert(beat.incarnation);
    }
  }
  const auto ack = table_.ack(verdict);
  settle();
  return ack;
}

void supervisor_life::place(const placement_request& request, answer then) {
  auto outcome = routes_.place(request, clock());
  if (!outcome) {
    placement refused;
    refused.failed = static_cast<std::uint8_t>(outcome.error().code);
    return then(refused);
  }
  if (const auto* placed = std::get_if<placement>(&*outcome)) {
    check(*placed);
    return then(*placed);
  }
  waiting_[std::get<ticket_id>(*outcome)] = std::move(then);
}

void supervisor_life::placed_request_ended(const std::string& request) {
  routes_.finished(request);
}

void supervisor_life::connection_lost(const std::shared_ptr<connection>& which) {
  for (auto it = peers_.begin(); it != peers_.end(); ++it) {
    if (it->second != which) continue;
    table_.connection_lost(it->first, which->node->incarnation, "simulated", clock());
    uninformed_.erase(it->first);
    peers_.erase(it);
    break;
  }
  settle();
}

void supervisor_life::leaves(const std::string& name, std::uint64_t which) {
  table_.leave(name, which, clock());
  settle();
}

void supervisor_life::drain(const std::string& name, milliseconds deadline) {
  const auto drained = table_.drain(name);
  if (!drained) return;
  const auto slot = std::ranges::find(table_.options().slots, name, &expected_slot::name);
  drains_.begin(slot->stage, slot->replica, {{name, *drained}}, deadline, table_.epoch(), clock());
  for (const auto& m : table_.view().members) {
    if (m.node.name != name || m.load.queue_length == 0) continue;
    drains_.heard({m.node.name, m.node.incarnation, 0, m.load, {}, 0});
  }
  if (const auto it = peers_.find(name);
      it != peers_.end() && it->second->node->incarnation == *drained) {
    world_.drain_begins(it->second->node, number, clock() + deadline);
  }
  order({name, *drained}, drain_step::finish);
  judge_drains();
  settle();
}

void supervisor_life::judge_drains() {
  const auto unfinished = [this](std::string_view stage, std::uint32_t replica) {
    return routes_.unfinished(stage, replica);
  };
  for (const auto& verdict : drains_.judge(unfinished, clock())) {
    for (const auto& who : verdict.ranks) {
      if (!verdict.leave) {
        table_.draining(who.name, who.incarnation, verdict.reason);
        continue;
      }
      table_.drained(who.name, who.incarnation, verdict.reason);
      if (verdict.reason != drained_reason) late_.insert(who.incarnation);
      order(who, drain_step::leave);
    }
  }
}

/// Sends an order, but only to the life that is meant.
void supervisor_life::order(const drain_list::rank& who, drain_step step) {
  const auto it = peers_.find(who.name);
  if (it == peers_.end() || it->second->node->incarnation != who.incarnation) return;
  const auto over = it->second;
  const bool late = step == drain_step::leave && late_.contains(who.incarnation);
  world_.send(over, false, [&w = world_, over, what = drain_order{who.incarnation, step}, late] {
    w.ordered(over->node, what, late);
  });
}

void supervisor_life::tick() {
  if (world_.now() >= ticks_again) {
    table_.tick(clock());
    judge_drains();
    settle();
    deliver(routes_.serve(clock()));
  }
  const auto self = shared_from_this();
  world_.time.after(milliseconds{50},
                    [&w = world_, self] { w.in(self, [self] { self->tick(); }); });
}

void supervisor_life::settle() {
  const auto changes = table_.take_transitions();
  for (const auto& change : changes) {
    world_.note(to_string(change.to), change.incarnation, change.epoch);
    world_.require(change.epoch > last_epoch_, "an epoch did not rise");
    world_.told.epochs = last_epoch_ = change.epoch;
    world_.check_alarm(change);
    if (change.to != node_state::down) continue;
    drains_.lost(change.name, change.incarnation);
    const auto it = peers_.find(change.name);
    if (table_.reports_failure(change.name)) continue;
    if (it == peers_.end() || it->second->node->incarnation != change.incarnation) continue;
    const auto over = it->second;
    world_.send(over, false, [&w = world_, over] { w.lost_supervisor(over->node, over); });
    peers_.erase(it);
    uninformed_.erase(change.name);
  }
  if (!changes.empty()) {
    check_states();
    routes_.update(table_.view(), clock());
    static_cast<void>(routes_.take_notes());
    deliver(routes_.serve(clock()));
  }
  keep();
  broadcast();
}

/// Saves like the actor: at most ten times a second, so a crash loses later changes.
void supervisor_life::keep() {
  if (kept_epoch_ == table_.epoch() || clock() - kept_at_ < milliseconds{100}) return;
  kept_epoch_ = table_.epoch();
  kept_at_ = clock();
  world_.kept = table_.record();
}

void supervisor_life::broadcast() {
  std::shared_ptr<const told_members> members;
  const auto tell = [&](const std::shared_ptr<connection>& over) {
    world_.send(over, false, [&w = world_, over, members] { w.hear_members(over->node, members); });
  };
  if (auto fresh = table_.take_broadcast(clock())) {
    members = world_.published(*std::move(fresh), number);
    for (const auto& [name, over] : peers_) tell(over);
    uninformed_.clear();
    return;
  }
  for (const auto& name : std::exchange(uninformed_, {})) {
    if (!members) members = world_.published(table_.view(), number);
    if (const auto it = peers_.find(name); it != peers_.end()) tell(it->second);
  }
}

void supervisor_life::deliver(std::vector<served_ticket> served) {
  for (auto& s : served) {
    const auto it = waiting_.find(s.ticket);
    if (it == waiting_.end()) {
      world_.violate("a request in line was answered twice");
      continue;
    }
    const auto then = std::move(it->second);
    waiting_.erase(it);
    if (s.outcome) {
      check(*s.outcome);
      then(*s.outcome);
    } else {
      placement refused;
      refused.failed = static_cast<std::uint8_t>(s.outcome.error().code);
      then(refused);
    }
  }
}

/// Checks that every placed node is up at the placement's epoch.
void supervisor_life::check(const placement& given) {
  world_.require(given.epoch == table_.epoch(), "a placement of a former epoch");
  for (const auto* ranks : {&given.prefill, &given.decode}) {
    world_.require(!ranks->empty(), "a placement of nobody");
    for (const auto& node : *ranks) {
      world_.require(table_.state_of(node.name) == node_state::up &&
                         table_.incarnation_of(node.name) == node.incarnation,
                     "a placement on a node that is not up");
      world_.require(world_.may_be_placed_on(node), "a placement on a node that leaves");
      world_.require(!failing_.contains(node.incarnation),
                     "a placement on a node whose engine has failed");
    }
  }
}

/// Checks that no replaced life of a node is up under its old incarnation, and that the list agrees
/// with the table.
void supervisor_life::check_states() {
  for (const auto& m : table_.view().members) {
    const auto state = node_state_from(m.state);
    world_.require(state && table_.state_of(m.node.name) == state, "the list is not the table");
    if (state == node_state::up || state == node_state::suspect) {
      world_.require(!replaced_.contains(m.node.incarnation), "a replaced life is up");
    }
  }
}

}  // namespace troupe::actors::cluster_simulation
