#include "troupe/actors/link/link.hpp"

#include <string>
#include <utility>
#include <variant>

#include "troupe/actors/link/link_parts.hpp"
#include "troupe/actors/runtime/system.hpp"
#include "troupe/kvcache/overloaded.hpp"

namespace troupe::actors {

namespace link_parts {

namespace {

link_report report(const link_state& st) {
  link_report r;
  r.peer = st.peer.name;
  r.peer_incarnation = st.peer.incarnation;
  if (st.chose) r.backend = std::string{transport::to_string(st.choice.kind)};
  r.reason = st.choice.reason;
  switch (st.now) {
    case link_state::phase::dialling:
    case link_state::phase::connecting: r.state = st.broke ? "rebuilding" : "connecting"; break;
    case link_state::phase::up: r.state = "up"; break;
    case link_state::phase::ending: r.state = "broken"; break;
  }
  r.rebuilds = st.rebuilds;
  r.last_break = st.last_break;
  if (st.link) {
    const auto stats = st.link->stats();
    r.lanes = stats.lanes;
    r.bytes_out = stats.bytes_out;
    r.bytes_in = stats.bytes_in;
    r.in_flight = stats.in_flight;
    r.refused = stats.refused;
    r.posted = stats.batches_posted;
    r.completed = stats.batches_completed;
    r.failed = stats.batches_failed;
    for (const auto& lane : stats.by_lane) {
      r.by_lane.push_back({lane.device, lane.port, lane.gid_index, lane.gid, lane.requests_posted,
                           lane.requests_completed, lane.bytes,
                           static_cast<std::uint8_t>(lane.port_up ? 1 : 0), lane.port_downs,
                           lane.port_changes,
                           lane.port_retries ? static_cast<std::int64_t>(*lane.port_retries) : -1});
    }
  }
  return r;
}

}  // namespace

}  // namespace link_parts

link_actor::behavior_type link_behavior(link_actor::stateful_pointer<link_state> self,
                                        link_options options) {
  set_log_handlers(*self, "link");
  using namespace link_parts;
  auto& st = self->state;
  st.context = std::move(options.context);
  st.port = std::move(options.port);
  st.peer = std::move(options.peer);
  st.role = options.role;
  st.asked = options.asked;
  st.pulse = link_pulse{st.context->settings.peer_silence};
  st.reader = std::make_unique<inline_executor>(self->system());
  self->set_down_handler([self](const caf::down_msg& down) {
    const auto& state = self->state;
    // An acceptor of an attempt that failed is watched as well, and does not matter any more.
    if (down.source != state.peer_node.address() && down.source != state.other_end.address())
      return;
    const bool end_of_attempt = state.role == transport::link_role::initiator && !state.broke &&
                                state.now != link_state::phase::up;
    if (down.source == state.other_end.address() && (!down.reason || end_of_attempt)) {
      other_end_ended(self,
                      down.reason ? "the end of " + state.peer.name + " crashed (" +
                                        self->system().render(down.reason) + ")"
                                  : state.peer.name + " ended the link",
                      true);
      return;
    }
    if (down.source == state.other_end.address() && state.leaving) {
      end_link(self, *state.leaving);
      return;
    }
    on_peer_left(self,
                 peer_left{{errc::peer_lost, "the process of " + state.peer.name + " is gone"}});
  });
  if (st.role == transport::link_role::initiator) dial(self);
  return {
      [self](link_command& command) {
        std::visit(
            overloaded{[self](attach_session& x) { on_attach_session(self, std::move(x)); },
                       [self](detach_session& x) { on_detach_session(self, x); },
                       [self](say& x) { on_say(self, std::move(x)); },
                       [self](post_batch& x) { on_post_batch(self, std::move(x)); },
                       [self](fence_now& x) { on_fence_now(self, x); },
                       [self](close_link& x) { on_close_link(self, std::move(x)); },
                       [self](leave_link& x) { on_leave_link(self, std::move(x)); },
                       [self](peer_left& x) { on_peer_left(self, std::move(x)); },
                       [self](read_last_frames& x) { on_read_last_frames(self, std::move(x)); },
                       [self](dial_again&) { on_dial_again(self); },
                       [self](look_for_dialler& x) { on_look_for_dialler(self, x); },
                       [self](look_for_room&) { on_look_for_room(self); },
                       [self](check_peer_alive&) { on_check_peer_alive(self); }},
            command.what);
      },
      [self](link_event& event) {
        if (event.generation != self->state.generation &&
            !std::holds_alternative<fence_holds>(event.what)) {
          return;
        }
        std::visit(
            overloaded{[self](link_came_up&) { on_link_came_up(self); },
                       [self](session_message& x) { on_session_message(self, std::move(x)); },
                       [self](transport::completion& x) { on_completion(self, std::move(x)); },
                       [self](fence_holds& x) { on_fence_holds(self, x); },
                       [self](link_broke& x) { on_link_broke(self, std::move(x)); }},
            event.what);
      },
      [self](const link_request& request) { return accept(self, request); },
      [self](const link_notice& notice) { hear(self, notice); },
      [self](report_atom) { return report(self->state); },
  };
}

}  // namespace troupe::actors
