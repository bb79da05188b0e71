#include "troupe/actors/node/node.hpp"

#include <utility>
#include <variant>

#include "troupe/actors/node/node_core.hpp"
#include "troupe/actors/runtime/crash.hpp"
#include "troupe/actors/runtime/inline_executor.hpp"
#include "troupe/actors/runtime/system.hpp"
#include "troupe/kvcache/overloaded.hpp"

namespace troupe::actors {

namespace nodes {

node_core::node_core(self_pointer self, context_ptr context, runner_actor runner,
                     pool_manager_actor pool, node_drain_ptr drain)
    : self_{self},
      context_{std::move(context)},
      runner_{std::move(runner)},
      pool_{std::move(pool)},
      drain_{std::move(drain)} {}

void node_core::beat() {
  expire_calls();
  expire_placements();
  self_->delayed_send(self_, context_->settings.heartbeat_interval, tick_atom::value);
  if (replaced_) return;
  if (registered_) {
    say_alive();
  } else {
    reach_supervisor();
  }
}

void node_core::on_stop_node() {
  // Otherwise the supervisor would place them on behalf of a node that is gone, and count them.
  if (supervisor_) {
    for (const auto& [operation, asked] : placements_) {
      self_->send(supervisor_, placed_request_ended_atom::value, asked.request);
    }
  }
  fail_placements({errc::aborted, "the node stops"});
  // A node that crashed does not leave in good order.
  if (supervisor_ && !replaced_) {
    self_->send(supervisor_, leave_atom::value, context_->self.name, context_->self.incarnation);
  }
  for (const auto& [id, link] : links_) {
    tell(link.actor, link_command{leave_link{{errc::aborted, "the node stops"}}});
  }
  for (auto& [id, call] : calls_) {
    call.promise.deliver(
        call_reply{static_cast<std::uint8_t>(errc::aborted), "the node stops", {}});
  }
  calls_.clear();
  end_reports();
  self_->quit();
}

void node_core::child_ended(const caf::down_msg& down) {
  if (watched_ && down.source == watched_) {
    watched_ = nullptr;
    lost_supervisor(troupe::error{errc::peer_lost, "its process is gone"});
    // The answers were lost with the supervisor, and the timeouts may be hours away.
    fail_placements({errc::peer_lost, "the supervisor's process is gone; ask again"});
    return;
  }
  if (essential_ended(down)) return;
  const auto link = links_.find(down.source.id());
  if (link == links_.end()) return;
  if (crashed(down.reason)) link_crashed(link->second);
  if (down.reason && link->second.asked != 0) {
    // The link crashed without its last message: operations that wait for it must not wait on.
    answer_gone({link->second.peer, 0, link->second.asked},
                {errc::internal, "the link's actor crashed; see the log"});
  }
  links_.erase(link);
}

local_node_actor::behavior_type node_core::begin() {
  self_->set_down_handler([this](const caf::down_msg& down) { child_ended(down); });
  watch_essentials();
  return {
      [this](members_atom, membership& fresh) { adopt(fresh); },
      [this](register_again_atom) {
        registered_ = false;
        reach_supervisor();
      },
      [this](drain_atom, const drain_order& order) { take_order(order); },
      [this](const link_request& request) { return accept_link(request); },
      [this](report_atom) { return make_report(); },
      [this](call_request& request) { return take_call(request); },
      [this](node_command& command) {
        std::visit(overloaded{[this](need_link& x) { on_need_link(x); },
                              [this](look_again&) { make_wanted_links(); },
                              [this](start_place& x) { on_start_place(x); },
                              [this](placed_request_ended& x) {
                                tell_placed_request_ended(std::move(x.request));
                              },
                              [this](call_answered& x) { on_call_answered(x); },
                              [this](stop_node&) { on_stop_node(); },
                              [this](try_supervisor&) { on_try_supervisor(); },
                              [this](supervisor_looked& x) { on_supervisor_looked(x); },
                              [this](engine_failed& x) { on_engine_failed(x); },
                              [this](engine_recovered&) { on_engine_recovered(); }},
                   command.what);
      },
      [this](tick_atom) { beat(); },
  };
}

}  // namespace nodes

node_slot::node_slot() = default;
node_slot::~node_slot() = default;

local_node_actor::behavior_type node(local_node_actor::stateful_pointer<node_slot> self,
                                     context_ptr context, runner_actor runner,
                                     pool_manager_actor pool, node_drain_ptr drain) {
  set_log_handlers(*self, "node");
  self->state.core = std::make_unique<nodes::node_core>(self, std::move(context), std::move(runner),
                                                        std::move(pool), std::move(drain));
  return self->state.core->begin();
}

}  // namespace troupe::actors
