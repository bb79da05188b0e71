#include "simulated_peers.hpp"

#include <algorithm>
#include <atomic>
#include <memory>
#include <utility>

#include <caf/actor_cast.hpp>
#include <caf/scoped_actor.hpp>
#include <caf/stateful_actor.hpp>
#include <caf/typed_event_based_actor.hpp>
#include <unistd.h>

#include "troupe/actors/runtime/network.hpp"
#include "troupe/actors/runtime/system.hpp"

namespace troupe::bench {

using namespace actors;

namespace {

/// Counts of all peers of the process; read by its main thread.
struct counters {
  std::atomic<std::uint64_t> registered{0}, informed{0}, answered{0}, lists{0}, entries{0};
};

struct peer_settings {
  std::string cluster;
  node_info node;
  std::size_t nodes{0};  ///< of the whole cluster
  std::uint16_t supervisor_port{0};
  std::chrono::milliseconds interval{1000};
  std::shared_ptr<counters> count;
};

using peer_actor = node_actor::extend<caf::reacts_to<tick_atom>>;

struct peer_state {
  static inline const char* name = "peer";
  peer_settings settings;
  supervisor_actor supervisor;
  bool registered{false};
  bool asks{false};
  bool informed{false};
  std::uint64_t beats{0};
  std::uint64_t epoch{0};

  void set_registered(bool now) {
    if (std::exchange(registered, now) == now) return;
    now ? ++settings.count->registered : --settings.count->registered;
  }
  void set_informed(bool now) {
    if (std::exchange(informed, now) == now) return;
    now ? ++settings.count->informed : --settings.count->informed;
  }
};
using self_pointer = peer_actor::stateful_pointer<peer_state>;

void say_alive(self_pointer self) {
  auto& st = self->state;
  heartbeat beat;
  beat.name = st.settings.node.name;
  beat.incarnation = st.settings.node.incarnation;
  beat.sequence = ++st.beats;
  beat.load.queue_length = static_cast<std::uint32_t>(st.beats % 7);
  beat.load.blocks_total = 4096;
  beat.load.blocks_free = 4096 - st.beats % 1000;
  beat.load.links_up = 8;
  beat.epoch = st.epoch;
  self->request(st.supervisor, st.settings.interval, std::move(beat))
      .then(
          [self](const heartbeat_ack& ack) {
            ++self->state.settings.count->answered;
            if (!ack.known) self->state.set_registered(false);
          },
          [](const caf::error&) {});
}

void register_now(self_pointer self) {
  auto& st = self->state;
  registration_request request;
  request.cluster = st.settings.cluster;
  request.node = st.settings.node;
  self->request(st.supervisor, st.settings.interval * 2, register_atom_v, request,
                caf::actor_cast<node_actor>(caf::actor_cast<caf::strong_actor_ptr>(self)))
      .then(
          [self](const registration& answer) {
            self->state.asks = false;
            self->state.set_registered(answer.failed == 0);
            if (self->state.registered) say_alive(self);
          },
          [self](const caf::error&) { self->state.asks = false; });
}

void reach_supervisor(self_pointer self) {
  auto& st = self->state;
  if (std::exchange(st.asks, true)) return;
  if (st.supervisor) return register_now(self);
  reach<supervisor_actor>(self, "127.0.0.1", st.settings.supervisor_port, st.settings.interval * 2)
      .then(
          [self](const reached& found) {
            self->state.asks = false;
            if (!found.actor) return;
            self->state.supervisor = caf::actor_cast<supervisor_actor>(found.actor);
            self->monitor(self->state.supervisor);
            reach_supervisor(self);
          },
          [self](const caf::error&) { self->state.asks = false; });
}

void hear(self_pointer self, const membership& members) {
  auto& st = self->state;
  st.epoch = members.epoch;
  ++st.settings.count->lists;
  st.settings.count->entries += members.members.size();
  const auto up = std::ranges::count_if(
      members.members, [](const member& m) { return node_state_from(m.state) == node_state::up; });
  st.set_informed(static_cast<std::size_t>(up) == st.settings.nodes);
}

peer_actor::behavior_type peer(self_pointer self, peer_settings settings) {
  set_log_handlers(*self, "peer");
  self->state.settings = std::move(settings);
  self->set_down_handler([self](const caf::down_msg&) {
    self->state.supervisor = nullptr;
    self->state.asks = false;
    self->state.set_registered(false);
    self->state.set_informed(false);
    reach_supervisor(self);
  });
  return {
      [self](members_atom, const membership& members) { hear(self, members); },
      [self](register_again_atom) { self->state.set_registered(false); },
      [](drain_atom, const drain_order&) {},
      [](const link_request&) { return link_reply{}; },
      [](report_atom) { return node_report{}; },
      [](const call_request&) { return call_reply{}; },
      [self](tick_atom) {
        self->delayed_send(self, self->state.settings.interval, tick_atom_v);
        if (self->state.registered) {
          say_alive(self);
        } else {
          reach_supervisor(self);
        }
      },
  };
}

supervisor_actor::behavior_type bare_supervisor(supervisor_actor::pointer,
                                                std::chrono::milliseconds interval) {
  return {
      [interval](register_atom, const registration_request&, const node_actor&) {
        registration out;
        out.heartbeat_interval_ms = static_cast<std::uint32_t>(interval.count());
        return out;
      },
      [](const heartbeat&) {
        return heartbeat_ack{true, 1, 1};
      },
      [](leave_atom, const std::string&, std::uint64_t) {},
      [](place_atom, const placement_request&) { return placement{}; },
      [](placed_request_ended_atom, const std::string&) {},
      [](members_atom) { return membership{}; },
      [](drain_atom, const drain_request&) { return drain_reply{}; },
      [](lease_name_atom, const name_request&) { return name_lease{}; },
      [](events_atom, const event_query&) { return event_page{}; },
      [](tick_atom) {},
  };
}

}  // namespace

void simulate_peers(const std::string& cluster, const std::vector<expected_slot>& slots,
                    std::size_t of, std::uint16_t supervisor_port,
                    std::chrono::milliseconds interval, const control& parent) {
  const auto count = std::make_shared<counters>();
  actor_host host{{.threads = 1}};
  std::uint64_t number = 0;
  for (const auto& slot : slots) {
    peer_settings settings{cluster, {}, of, supervisor_port, interval, count};
    settings.node.name = slot.name;
    settings.node.stage = slot.stage;
    settings.node.role = static_cast<std::uint8_t>(slot.role);
    settings.node.rank = slot.rank;
    settings.node.ranks = slot.ranks;
    settings.node.host = "127.0.0.1";
    settings.node.port = static_cast<std::uint16_t>(1024 + slot.replica);
    settings.node.incarnation = draw_incarnation();
    settings.node.pid = static_cast<std::uint32_t>(::getpid());
    const auto actor = host.system().spawn(peer, std::move(settings));
    host.own(actor);
    // Spreads the heartbeats over time.
    caf::scoped_actor {
      host.system()
      } -> delayed_send(actor, interval * static_cast<std::int64_t>(number++) / slots.size(),
                        tick_atom_v);
  }
  for (;;) {
    parent.get<char>();
    parent.put(peer_count{count->registered, count->informed, count->answered, count->lists,
                          count->entries});
  }
}

supervisor_actor spawn_bare_supervisor(caf::actor_system& system,
                                       std::chrono::milliseconds interval) {
  return system.spawn(bare_supervisor, interval);
}

}  // namespace troupe::bench
