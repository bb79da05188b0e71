#include "troupe/actors/node/node.hpp"

#include <utility>
#include <variant>

#include "troupe/actors/node/node_parts.hpp"
#include "troupe/actors/runtime/crash.hpp"
#include "troupe/actors/runtime/inline_executor.hpp"
#include "troupe/actors/runtime/system.hpp"
#include "troupe/kvcache/overloaded.hpp"

namespace troupe::actors {

namespace node_parts {

namespace {

void beat(self_pointer self) {
  auto& st = self->state;
  expire_calls(st);
  expire_placements(self);
  self->delayed_send(self, st.context->settings.heartbeat_interval, tick_atom::value);
  if (st.replaced) return;
  if (st.registered) {
    say_alive(self);
  } else {
    reach_supervisor(self);
  }
}

void on_stop_node(self_pointer self) {
  auto& st = self->state;
  // Else they would be placed for nobody, and count there.
  if (st.supervisor) {
    for (const auto& [operation, asked] : st.placements) {
      self->send(st.supervisor, finished_atom::value, asked.request);
    }
  }
  fail_placements(st, {errc::aborted, "the node stops"});
  // One that crashed does not leave in good order.
  if (st.supervisor && !st.replaced) {
    self->send(st.supervisor, leave_atom::value, st.context->self.name,
               st.context->self.incarnation);
  }
  for (const auto& [id, link] : st.links) {
    tell(link.actor, link_command{leave_link{{errc::aborted, "the node stops"}}});
  }
  for (auto& [id, call] : st.calls) {
    call.promise.deliver(
        call_reply{static_cast<std::uint8_t>(errc::aborted), "the node stops", {}});
  }
  st.calls.clear();
  end_reports(st);
  self->quit();
}

void child_ended(self_pointer self, const caf::down_msg& down) {
  auto& st = self->state;
  if (st.watched && down.source == st.watched) {
    st.watched = nullptr;
    lost_supervisor(self, troupe::error{errc::peer_lost, "its process is gone"});
    // Their answers were lost with it, and their time outs may be hours away.
    fail_placements(st, {errc::peer_lost, "the supervisor's process is gone; ask again"});
    return;
  }
  if (essential_ended(self, down)) return;
  const auto link = st.links.find(down.source.id());
  if (link == st.links.end()) return;
  if (crashed(down.reason)) link_crashed(self, link->second);
  if (down.reason && link->second.asked != 0) {
    // By a defect of ours, and without its last message: whoever waits for it must not wait on.
    answer_gone(st, {link->second.peer, 0, link->second.asked},
                {errc::internal, "the link's actor crashed; see the log"});
  }
  st.links.erase(link);
}

}  // namespace

}  // namespace node_parts

local_node_actor::behavior_type node(local_node_actor::stateful_pointer<node_state_data> self,
                                     context_ptr context, engine_port_actor port,
                                     pool_manager_actor pool, node_drain_ptr drain) {
  set_log_handlers(*self, "node");
  using namespace node_parts;
  auto& st = self->state;
  st.context = std::move(context);
  st.port = std::move(port);
  st.pool = std::move(pool);
  st.drain = std::move(drain);
  self->set_down_handler([self](const caf::down_msg& down) { child_ended(self, down); });
  watch_essentials(self);
  return {
      [self](members_atom, membership& fresh) { adopt(self, fresh); },
      [self](register_again_atom) {
        self->state.registered = false;
        reach_supervisor(self);
      },
      [self](drain_atom, const drain_order& order) { take_order(self, order); },
      [self](const link_request& request) { return accept_link(self, request); },
      [self](report_atom) { return make_report(self); },
      [self](call_request& request) { return take_call(self, request); },
      [self](node_command& command) {
        std::visit(overloaded{[self](need_link& x) { on_need_link(self, x); },
                              [self](look_again&) { on_look_again(self); },
                              [self](start_place& x) { on_start_place(self, x); },
                              [self](placed_ended& x) { on_placed_ended(self, x); },
                              [self](call_answered& x) { on_call_answered(self, x); },
                              [self](stop_node&) { on_stop_node(self); },
                              [self](try_supervisor&) { on_try_supervisor(self); },
                              [self](supervisor_looked& x) { on_supervisor_looked(self, x); },
                              [self](engine_failed& x) { on_engine_failed(self, x); },
                              [self](engine_recovered&) { on_engine_recovered(self); }},
                   command.what);
      },
      [self](tick_atom) { beat(self); },
  };
}

}  // namespace troupe::actors
