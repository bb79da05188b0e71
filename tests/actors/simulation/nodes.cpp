#include <algorithm>
#include <string>
#include <utility>

#include "troupe/actors/messages/member_list.hpp"

#include "link.hpp"
#include "supervisor_life.hpp"
#include "transfer.hpp"
#include "world.hpp"

namespace troupe::actors::cluster_simulation {

namespace {

constexpr milliseconds interval{1000};
constexpr auto answer_within = 2 * interval;

}  // namespace

// -- lives

void world::start_node(std::uint32_t node) {
  auto fresh = std::make_shared<node_life>(node, given.blocks, draw_incarnation());
  const auto former = lives_[node];
  const auto& slot = slots_[node];
  fresh->born = fresh->awake_since = now();
  fresh->former = former;
  fresh->info.name = slot.name;
  fresh->info.stage = slot.stage;
  fresh->info.role = static_cast<std::uint8_t>(slot.role);
  fresh->info.replica = slot.replica;
  fresh->info.host = "10.0.0.1";
  // Half of them return at their former port, if nothing listens there.
  const bool same_port = former && chance.one_in(2) && !former->alive;
  fresh->info.port =
      same_port ? former->info.port : static_cast<std::uint16_t>(1024 + chance.upto(60'000));
  fresh->info.incarnation = fresh->incarnation;
  // In a large cluster only some nodes watch, since each sees every list.
  if (lives_.size() < 64 || node % 16 == 0) fresh->watch.emplace(slot.name);
  fresh->takes.seed(static_cast<std::minstd_rand::result_type>(fresh->incarnation));
  lives_[node] = fresh;
  takes_apart([who = std::weak_ptr{fresh}] {
    if (const auto one = who.lock()) one->take_apart();
  });
  if (given.absent_nodes.contains(node)) {
    fresh->alive = false;
    return;
  }
  note("starts", node, fresh->incarnation);
  time.after(between(microseconds{0}, interval), [this, fresh] { beat(fresh); });
}

void node_life::take_apart() {
  held_up.clear();
  supervisor.reset();
  busy_with.clear();
  waiters.clear();
  holds.clear();
  callers.clear();
  links.clear();
}

void world::end(const life& gone) {
  if (!gone->alive) return;
  gone->alive = false;
  gone->died = now();
  gone->held_up.clear();
  gone->busy_with.clear();
  gone->holds.clear();
  gone->members.reset();
  gone->watch.reset();
  note("ends", gone->node, gone->incarnation);
  for (auto& hears : std::exchange(gone->callers, {})) {
    time.after(between(milliseconds{1}, milliseconds{200}), std::move(hears));
  }
  // The kernel closes a dead process's sockets. If the host lost its power, peers hear nothing.
  const bool heard = !chance.one_in(8);
  if (gone->supervisor) {
    break_connection(gone->supervisor, heard ? milliseconds{5} : milliseconds{20'000});
  }
  for (const auto& [peer, wire] : std::exchange(gone->links, {})) {
    wire->breaks(heard ? milliseconds{5} : milliseconds{20'000});
  }
}

// -- the wire to the supervisor

void world::send(const std::shared_ptr<connection>& over, bool to_supervisor,
                 std::function<void()> what) {
  if (over->broken) return;
  auto& last = over->last[to_supervisor ? 1 : 0];
  last = std::max(last, now() + one_way());
  time.at(last, [this, over, to_supervisor, what = std::move(what)] {
    if (over->broken) return;
    if (!reach(over->node->node, supervisor_end)) {
      // Neither side notices before the connection times out.
      return break_connection(over, milliseconds{4000});
    }
    if (to_supervisor) {
      in(over->supervisor, what);
    } else {
      in(over->node, what);
    }
  });
}

void world::break_connection(const std::shared_ptr<connection>& which, microseconds seen_within) {
  if (which->broken) return;
  which->broken = true;
  time.after(between(microseconds{100}, seen_within), [this, which] {
    in(which->node, [this, which] { lost_supervisor(which->node, which); });
  });
  time.after(between(microseconds{100}, seen_within), [this, which] {
    in(which->supervisor, [which] { which->supervisor->connection_lost(which); });
  });
}

// -- what the node actor does

void world::beat(const life& at) {
  if (!at->alive) return;
  time.after(interval, [this, at] { beat(at); });
  in(at, [this, at] {
    lapsed(at, at->leases.beat(clock_of(*at), at->registered ? cache_leases::news::current
                                                             : cache_leases::news::old));
    if (at->registered) {
      say_alive(at);
    } else {
      reach_supervisor(at);
    }
  });
}

void world::lost_supervisor(const life& at, const std::shared_ptr<connection>& which) {
  if (at->supervisor != which) return;
  at->registered = false;
  at->asking_since.reset();
  if (which->broken) {
    at->supervisor = nullptr;
  } else {
    reach_supervisor(at);  // it was told to register again
  }
}

void world::reach_supervisor(const life& at) {
  if (at->asking_since && now() - *at->asking_since < answer_within) return;
  at->asking_since = now();
  if (at->supervisor) return register_node(at);
  const auto whom = supervisor;
  if (!whom->alive || !reach(at->node, supervisor_end)) return;
  time.after(one_way() + one_way(), [this, at, whom] {
    if (!whom->alive || !reach(at->node, supervisor_end)) return;
    in(at, [this, at, whom] {
      // If the supervisor died while this node was frozen, the connection is closed.
      if (at->supervisor || !whom->alive) return;
      at->supervisor = std::make_shared<connection>(connection{at, whom});
      register_node(at);
    });
  });
}

void world::register_node(const life& at) {
  at->drain.asks();
  registration_request request;
  request.cluster = "simulated";
  request.node = at->info;
  const auto over = at->supervisor;
  send(over, true, [this, at, over, request] {
    const auto answer = over->supervisor->take_in(over, request);
    send(over, false, [this, at, over, answer] { registered(at, over, answer); });
    over->supervisor->settle();
  });
}

void world::registered(const life& at, const std::shared_ptr<connection>& over,
                       const registration& answer) {
  if (at->supervisor != over) return;
  at->asking_since.reset();
  if (answer.failed == static_cast<std::uint8_t>(errc::stale_incarnation)) {
    return end(at);  // another process has its name
  }
  if (answer.failed != 0) return;
  at->registered = true;
  at->registered_since = now();
  if (at->drain.registered()) say_leaving(at);
  say_alive(at);
}

void world::say_alive(const life& at) {
  if (!at->supervisor) return;
  heartbeat beat;
  beat.name = at->info.name;
  beat.incarnation = at->incarnation;
  beat.sequence = ++at->beats;
  const auto counters = at->pool.counters();
  beat.load.queue_length = busy(at);
  beat.load.active_transfers = beat.load.queue_length;
  beat.failure = at->failure;
  beat.epoch = at->members ? at->members->list.epoch : 0;
  beat.load.blocks_total = counters.total;
  beat.load.blocks_free = counters.free;
  beat.load.blocks_quarantined = counters.quarantined;
  if (at->drain.beats(beat.load)) note("finds itself drained", at->node);
  const auto over = at->supervisor;
  send(over, true, [this, at, over, beat, asked = clock_of(*at)] {
    const auto ack = over->supervisor->heard(beat);
    send(over, false, [this, at, ack, asked] {
      if (ack.known) {
        const cache_leases::mark answer{ack.supervisor_incarnation, ack.epoch};
        return lapsed(at, at->leases.answered(answer, asked, clock_of(*at)));
      }
      if (!at->registered) return;
      at->registered = false;
      reach_supervisor(at);
    });
  });
  leave_if_drained(at);
}

// -- leaving

void world::say_leaving(const life& at) {
  if (!at->supervisor) return;
  send(at->supervisor, true,
       [at, over = at->supervisor] { over->supervisor->leaves(at->info.name, at->incarnation); });
}

std::uint32_t world::busy(const life& at) const {
  std::erase_if(at->busy_with,
                [](const auto& one) { return one.first->settled(static_cast<side>(one.second)); });
  return static_cast<std::uint32_t>(at->busy_with.size());
}

void world::ordered(const life& at, const drain_order& order, bool late) {
  if (!at->drain.ordered(order, at->incarnation)) return;
  at->late = late;
  leave_if_drained(at);
}

/// A process that learns that it is drained ends in good order, and a new one is started.
void world::leave_if_drained(const life& at) {
  if (at->drain.standing() != drain_standing::drained || std::exchange(at->leaves, true)) return;
  time.after(between(microseconds{0}, milliseconds{100}), [this, at] {
    in(at, [this, at] {
      check_departure(at);
      say_leaving(at);
      time.after(slowest_ + milliseconds{10}, [this, at] {
        if (lives_[at->node] != at) return end(at);
        fault("drained node left");
        end(at);
        time.after(between(milliseconds{500}, milliseconds{5000}), [this, at] {
          if (lives_[at->node] == at) start_node(at->node);
        });
      });
    });
  });
}

void world::check_departure(const life& at) {
  note("leaves", at->node, at->incarnation);
  require(at->late || busy(at) == 0, "a drained node leaves with something live");
}

void world::drain_begins(const life& at, std::uint32_t by, moment deadline) {
  drains_[at->incarnation] = {by, deadline};
}

std::shared_ptr<const told_members> world::published(membership list, std::uint32_t by) const {
  auto out = std::make_shared<told_members>();
  out->when = {by, list.epoch};
  out->list = std::move(list);
  out->by_node.resize(lives_.size());
  for (const auto& m : out->list.members) {
    if (const auto number = number_of(m.node.name)) out->by_node[*number] = &m;
  }
  return out;
}

/// Handles a membership list at a node: drops links to peers that are gone.
void world::hear_members(const life& at, const std::shared_ptr<const told_members>& members) {
  if (members->when.first == at->seen.first && members->when < at->seen) {
    return violate("a membership came behind a newer one of the same supervisor");
  }
  at->seen = members->when;
  at->members = members;
  trace(at->info.name + " hears of epoch " + std::to_string(members->list.epoch));
  watch_members(at);
  lapsed(at, at->leases.see({members, &members->list}, clock_of(*at)));
  std::vector<std::shared_ptr<link>> left;
  for (const auto& [incarnation, wire] : at->links) {
    // A list from before the link was requested is older than the placement.
    if (members->when < wire->placed()) continue;
    const auto* m = members->by_node[wire->peer_of(*at)->node];
    if (m == nullptr) continue;
    // A peer that is down by its own report is alive, and its transfers continue.
    const bool gone = node_state_from(m->state) == node_state::down && !reports_failure(*m);
    if (m->node.incarnation != incarnation || gone) {
      left.push_back(wire);
    }
  }
  for (const auto& wire : left) wire->left_by_peer(at);
}

void world::watch_members(const life& at) {
  if (!at->watch) return;
  at->watch->see(at->members->list);
  for (auto takes = at->takes() % 8; takes > 0 && at->watch->size() != 0; --takes) {
    const auto wrong = at->told.hear(at->watch->pop());
    if (!wrong.empty()) return violate("an engine is told what it may not be: " + wrong);
  }
}

/// Checks that an engine which has taken every event knows exactly the members of its list. While
/// the supervisor collects, it may know others.
void world::check_watch(const life& at) {
  if (!at->watch || !at->members) return;
  while (at->watch->size() != 0) {
    const auto wrong = at->told.hear(at->watch->pop());
    if (!wrong.empty()) return violate("an engine is told what it may not be: " + wrong);
  }
  auto others = at->told.there();
  for (const auto& m : at->members->list.members) {
    if (is_lost(m) || m.node.name == at->info.name) continue;
    const auto known = others.find(m.node.name);
    const bool knows = known != others.end() && known->second.incarnation == m.node.incarnation &&
                       known->second.state == static_cast<member_state>(m.state);
    // The list's record may be older than what the engine was told.
    if (!knows && node_state_from(m.state) == node_state::joining) continue;
    require(knows, "an engine that watches does not know of a member");
    if (!knows) return;
    others.erase(known);
  }
  require(others.empty() || at->members->list.collecting != 0,
          "an engine that watches takes somebody to be there who is not");
}

void world::serve_pool(const life& at) {
  for (auto& served : at->pool.serve(clock_of(*at))) {
    const auto waiter = at->waiters.find(served.waiter);
    if (waiter == at->waiters.end()) continue;
    const auto then = std::move(waiter->second);
    at->waiters.erase(waiter);
    then(std::move(served.outcome));
  }
}

}  // namespace troupe::actors::cluster_simulation
