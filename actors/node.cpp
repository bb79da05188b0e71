#include "troupe/actors/node.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <set>
#include <utility>

#include <caf/actor_system.hpp>
#include <caf/io/middleman.hpp>
#include <caf/io/middleman_actor.hpp>
#include <spdlog/spdlog.h>

#include "troupe/actors/inline_unit.hpp"
#include "troupe/actors/link.hpp"
#include "troupe/actors/logging.hpp"
#include "troupe/actors/system.hpp"

namespace troupe::actors {

namespace {

using self_pointer = local_node_actor::stateful_pointer<node_state_data>;

// -- links

link_actor spawn_link(self_pointer self, node_info peer, transport::link_role role) {
  auto& st = self->state;
  node_state_data::known_link known;
  known.peer = peer.name;
  known.incarnation = peer.incarnation;
  known.dialled = role == transport::link_role::initiator;
  known.actor = self->spawn<caf::monitored>(
      link_behavior, link_options{st.context, st.port, std::move(peer), role});
  auto actor = known.actor;
  st.links.emplace(actor.id(), std::move(known));
  return actor;
}

void close_links_of(node_state_data& st, std::uint64_t incarnation, const troupe::error& why) {
  for (const auto& [id, link] : st.links) {
    if (link.incarnation == incarnation) tell(link.actor, link_command{peer_left{why}});
  }
}

void answer_gone(node_state_data& st, const std::string& peer, troupe::error why) {
  tell(st.port, port_event{link_gone{peer, 0, 0, true, std::move(why)}});
}

/// The supervisor publishes changes at most this late: it coalesces them for 100 ms.
constexpr auto news_delay = std::chrono::milliseconds{300};

/// True: a link is being made, or it was said why not. False: the peer has not been seen yet.
bool make_link(self_pointer self, const std::string& peer,
               std::chrono::steady_clock::time_point since) {
  auto& st = self->state;
  const auto found = std::ranges::find_if(st.members.members,
                                          [&](const member& m) { return m.node.name == peer; });
  if (found == st.members.members.end()) return false;
  const auto state = node_state_from(found->state);
  switch (state.value_or(node_state::joining)) {
    case node_state::joining: return false;
    case node_state::down:
      // Its next life may have registered a moment ago: that news is on its way.
      if (std::chrono::steady_clock::now() < since + news_delay) return false;
      answer_gone(st, peer, {errc::peer_lost, peer + " is down"});
      return true;
    case node_state::up:
    case node_state::suspect:
    case node_state::leaving: break;
  }
  // The port asks once for all who wait for a peer, so none is being made now.
  spawn_link(self, found->node, transport::link_role::initiator);
  return true;
}

void make_wanted_links(self_pointer self) {
  auto& st = self->state;
  std::erase_if(st.wanted,
                [self](const auto& one) { return make_link(self, one.first, one.second); });
}

// -- registration

void lost_supervisor(self_pointer self, const std::string& why) {
  auto& st = self->state;
  st.registering = false;
  if (st.registered || st.refusal != why) {
    logger("node")->warn("not registered with the supervisor at {}:{}: {}",
                         st.context->settings.supervisor_host, st.context->settings.supervisor_port,
                         why);
  }
  st.registered = false;
  st.context->registration.set(false, why);
  st.refusal = why;
  st.supervisor = nullptr;
}

void say_alive(self_pointer self);

void registration_came(self_pointer self, const registration& answer) {
  auto& st = self->state;
  st.registering = false;
  if (answer.failed != 0) {
    const auto code = is_errc(answer.failed) ? static_cast<errc>(answer.failed) : errc::internal;
    lost_supervisor(self, to_string(troupe::error{code, answer.sentence}));
    return;
  }
  st.registered = true;
  st.refusal.clear();
  st.context->registration.set(true, {});
  logger("node")->info(
      "registered with the supervisor as replica {} rank {} of stage {}, incarnation {:016x}",
      answer.replica, st.context->self.rank, st.context->self.stage, st.context->self.incarnation);
  say_alive(self);  // it is `joining` for the supervisor until it does
}

void register_now(self_pointer self) {
  auto& st = self->state;
  registration_request request;
  request.cluster = st.context->settings.cluster;
  request.node = st.context->self;
  request.wanted_replica = st.context->self.replica;
  self->request(st.supervisor, st.context->settings.heartbeat_interval * 2, register_atom::value,
                request, caf::actor_cast<node_actor>(caf::actor_cast<caf::strong_actor_ptr>(self)))
      .then([self](const registration& answer) { registration_came(self, answer); },
            [self](const caf::error& err) { lost_supervisor(self, self->system().render(err)); });
}

void reach_supervisor(self_pointer self) {
  auto& st = self->state;
  if (st.registering) return;
  st.registering = true;
  if (st.supervisor) {
    register_now(self);
    return;
  }
  const auto& settings = st.context->settings;
  self->request(self->system().middleman().actor_handle(), settings.heartbeat_interval * 2,
                caf::connect_atom::value, settings.supervisor_host, settings.supervisor_port)
      .then(
          [self](const caf::node_id&, const caf::strong_actor_ptr& found,
                 const std::set<std::string>& interface) {
            if (!found || !self->system().assignable(
                              interface, self->system().message_types<supervisor_actor>())) {
              lost_supervisor(self, "what listens there is no Troupe supervisor");
              return;
            }
            self->state.supervisor = caf::actor_cast<supervisor_actor>(found);
            self->monitor(self->state.supervisor);
            register_now(self);
          },
          [self](const caf::error& err) { lost_supervisor(self, self->system().render(err)); });
}

load_report load_of(const node_context& context) {
  load_report load;
  load.queue_length = context.counters.queue_length.load();
  load.active_transfers = context.counters.active_transfers.load();
  load.links_up = context.counters.links_up.load();
  if (context.pool) {
    const auto counters = context.pool->counters();
    load.blocks_total = counters.total;
    load.blocks_free = counters.free;
    load.blocks_quarantined = counters.quarantined;
    load.queue_length += counters.waiters;
  }
  return load;
}

void say_alive(self_pointer self) {
  auto& st = self->state;
  heartbeat message{st.context->self.name, st.context->self.incarnation, ++st.beats,
                    load_of(*st.context)};
  self->request(st.supervisor, st.context->settings.heartbeat_interval, std::move(message))
      .then(
          [self](const heartbeat_ack& ack) {
            if (ack.known || !self->state.registered) return;
            self->state.registered = false;
            reach_supervisor(self);
          },
          [self](const caf::error& err) {
            // A late answer is no loss; a supervisor that is gone is told by its monitor.
            logger("node")->debug("heartbeat not answered: {}", self->system().render(err));
          });
}

void beat(self_pointer self) {
  auto& st = self->state;
  self->delayed_send(self, st.context->settings.heartbeat_interval, tick_atom::value);
  if (st.registered) {
    say_alive(self);
  } else {
    reach_supervisor(self);
  }
}

// -- reports and calls

/// Asks every child; answers when all have said something, or did not within a second.
struct report_in_progress {
  node_report report;
  std::size_t waiting{0};
  caf::typed_response_promise<node_report> promise;

  void one_less() {
    if (--waiting == 0) promise.deliver(std::move(report));
  }
};

caf::typed_response_promise<node_report> make_report(self_pointer self) {
  auto& st = self->state;
  const auto& context = *st.context;
  auto progress = std::make_shared<report_in_progress>();
  progress->promise = self->make_response_promise<node_report>();
  auto& report = progress->report;
  report.node = context.self;
  report.epoch = st.members.epoch;
  report.supervisor_reachable = st.registered;
  report.uptime_ms =
      static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::milliseconds>(
                                     std::chrono::steady_clock::now() - context.started)
                                     .count());
  report.transfers_done = context.counters.transfers_done.load();
  report.transfers_failed = context.counters.transfers_failed.load();
  report.bytes_moved = context.counters.bytes_moved.load();
  constexpr auto patience = std::chrono::seconds{1};
  const auto silent = [progress](const caf::error&) { progress->one_less(); };
  progress->waiting = 2 + st.links.size();
  self->request(st.port, patience, report_atom::value)
      .then(
          [progress](transfer_reports& all) {
            progress->report.transfers = std::move(all.transfers);
            progress->one_less();
          },
          silent);
  self->request(st.pool, patience, report_atom::value)
      .then(
          [progress](pool_report& pool) {
            progress->report.pool = std::move(pool);
            progress->one_less();
          },
          silent);
  for (const auto& [id, link] : st.links) {
    self->request(link.actor, patience, report_atom::value)
        .then(
            [progress](link_report& one) {
              progress->report.links.push_back(std::move(one));
              progress->one_less();
            },
            silent);
  }
  return progress->promise;
}

/// Answers a call once, even if the engine drops it.
class call_answer {
 public:
  call_answer(caf::typed_actor<caf::reacts_to<node_command>> node, std::uint64_t id)
      : node_{std::move(node)}, id_{id} {}
  ~call_answer() { give(fail(errc::aborted, "the engine dropped the call")); }
  call_answer(const call_answer&) = delete;
  call_answer& operator=(const call_answer&) = delete;

  void give(result<std::vector<std::uint8_t>> answer) {
    if (given_.exchange(true)) return;
    call_reply reply;
    if (!answer) {
      reply.failed = static_cast<std::uint8_t>(answer.error().code);
      reply.sentence = answer.error().message;
    } else if (answer->size() > max_call_bytes) {
      reply.failed = static_cast<std::uint8_t>(errc::out_of_range);
      reply.sentence = "the engine's answer is larger than a call may carry";
    } else {
      reply.payload = std::move(*answer);
    }
    tell(node_, node_command{call_answered{id_, std::move(reply)}});
  }

 private:
  caf::typed_actor<caf::reacts_to<node_command>> node_;
  std::uint64_t id_;
  std::atomic<bool> given_{false};
};

caf::typed_response_promise<call_reply> take_call(self_pointer self, call_request& request) {
  auto& st = self->state;
  auto promise = self->make_response_promise<call_reply>();
  const auto refuse = [&](errc code, std::string sentence) {
    promise.deliver(call_reply{static_cast<std::uint8_t>(code), std::move(sentence), {}});
  };
  if (!st.context->on_call) {
    refuse(errc::not_found, "no engine takes calls at " + st.context->self.name);
  } else if (request.payload.size() > max_call_bytes) {
    refuse(errc::out_of_range,
           "a call carries at most " + std::to_string(max_call_bytes) + " bytes");
  } else if (st.calls.size() >= max_pending_calls) {
    refuse(errc::overloaded, "too many calls wait for the engine of " + st.context->self.name);
  } else {
    const auto id = st.next_call++;
    st.calls.emplace(id, promise);
    auto answer = std::make_shared<call_answer>(caf::actor_cast<local_node_actor>(self), id);
    try {
      st.context->on_call(call{
          std::move(request.method), std::move(request.payload),
          [answer](result<std::vector<std::uint8_t>> reply) { answer->give(std::move(reply)); }});
    } catch (const std::exception& thrown) {
      answer->give(
          fail(errc::internal, std::string{"the engine threw at the call: "} + thrown.what()));
    }
  }
  return promise;
}

// -- what the port and the engine ask

void carry_out(self_pointer self, need_link& order) {
  const auto now = std::chrono::steady_clock::now();
  if (make_link(self, order.peer, now)) return;
  self->state.wanted.emplace_back(std::move(order.peer), now);
  self->delayed_send(self, news_delay, node_command{look_again{}});
}

void carry_out(self_pointer self, look_again&) {
  make_wanted_links(self);
}

void fail_placement(node_state_data& st, operation_id operation, troupe::error why) {
  st.placements.erase(operation);
  if (st.context->operations.end(operation)) {
    st.context->events.push({operation, event_failed{std::move(why)}});
  }
}

void carry_out(self_pointer self, start_place& order) {
  auto& context = self->state.context;
  self->state.placements.insert(order.operation);
  const auto failed = [self, operation = order.operation](errc code, std::string sentence) {
    fail_placement(self->state, operation, {code, std::move(sentence)});
  };
  if (!self->state.supervisor) {
    failed(errc::peer_unreachable, "the supervisor cannot be reached: " + self->state.refusal);
    return;
  }
  const auto patience = std::chrono::milliseconds{order.request.timeout_ms} +
                        context->settings.heartbeat_interval * 2;
  self->request(self->state.supervisor, patience, place_atom::value, order.request)
      .then(
          [self, context, failed, operation = order.operation](placement& where) {
            self->state.placements.erase(operation);
            if (where.failed != 0) {
              failed(is_errc(where.failed) ? static_cast<errc>(where.failed) : errc::internal,
                     std::move(where.sentence));
            } else if (context->operations.end(operation)) {
              context->events.push({operation, event_placed{std::move(where)}});
            }
          },
          [self, failed](const caf::error& err) {
            failed(errc::deadline,
                   "the supervisor did not answer (" + self->system().render(err) + ")");
          });
}

void carry_out(self_pointer self, placed_ended& order) {
  auto& st = self->state;
  if (st.supervisor) self->send(st.supervisor, placed_atom::value, std::move(order.request));
}

void carry_out(self_pointer self, call_answered& order) {
  auto& st = self->state;
  const auto found = st.calls.find(order.call);
  if (found == st.calls.end()) return;
  found->second.deliver(std::move(order.reply));
  st.calls.erase(found);
}

void carry_out(self_pointer self, stop_node&) {
  auto& st = self->state;
  for (const auto operation : std::exchange(st.placements, {})) {
    fail_placement(st, operation, {errc::aborted, "the node stops"});
  }
  if (st.supervisor) {
    self->send(st.supervisor, leave_atom::value, st.context->self.name,
               st.context->self.incarnation);
  }
  for (const auto& [id, link] : st.links) {
    tell(link.actor, link_command{close_link{{errc::aborted, "the node stops"}}});
  }
  for (auto& [id, promise] : st.calls) {
    promise.deliver(call_reply{static_cast<std::uint8_t>(errc::aborted), "the node stops", {}});
  }
  st.calls.clear();
  self->quit();
}

// -- what other processes ask

void adopt(self_pointer self, membership& fresh) {
  auto& st = self->state;
  const bool older = fresh.supervisor_incarnation == st.members.supervisor_incarnation &&
                     fresh.epoch < st.members.epoch;
  if (older || fresh.cluster != st.context->settings.cluster) return;
  st.members = std::move(fresh);
  for (const auto& m : st.members.members) {
    if (node_state_from(m.state) == node_state::down) {
      close_links_of(st, m.node.incarnation, {errc::peer_lost, m.node.name + " is down"});
    }
  }
  make_wanted_links(self);
}

std::optional<troupe::error> refusal_of(const node_context& context, const link_request& request) {
  if (request.version != protocol_version) {
    return troupe::error{errc::version_mismatch,
                         "this node speaks protocol version " + std::to_string(protocol_version) +
                             ", the peer " + std::to_string(request.version)};
  }
  if (request.cluster != context.settings.cluster) {
    return troupe::error{errc::invalid_config, "this node belongs to cluster `" +
                                                   context.settings.cluster + "`, the peer to `" +
                                                   request.cluster + "`"};
  }
  if (request.to_incarnation != context.self.incarnation) {
    return troupe::error{errc::stale_incarnation,
                         context.self.name + " was restarted since; look its new incarnation up"};
  }
  if (request.from.incarnation == 0) {
    return troupe::error{errc::stale_incarnation, "the peer did not say which life of it asks"};
  }
  return std::nullopt;
}

caf::result<link_reply> accept_link(self_pointer self, const link_request& request) {
  auto& st = self->state;
  if (const auto why = refusal_of(*st.context, request)) {
    logger("node")->warn("refused a link with {}: {}", request.from.name, to_string(*why));
    return link_reply{static_cast<std::uint8_t>(why->code), why->message, {}, {}};
  }
  // A new life of a peer ends the links with the former one.
  for (const auto& [id, link] : st.links) {
    if (link.peer == request.from.name && link.incarnation != request.from.incarnation) {
      tell(link.actor,
           link_command{close_link{{errc::peer_lost, request.from.name + " was restarted"}}});
    }
  }
  auto acceptor = spawn_link(self, request.from, transport::link_role::acceptor);
  return self->delegate(acceptor, request);
}

void child_ended(self_pointer self, const caf::down_msg& down) {
  auto& st = self->state;
  if (st.supervisor && down.source == st.supervisor.address()) {
    lost_supervisor(self, "its process is gone");
    return;
  }
  st.links.erase(down.source.id());
}

}  // namespace

local_node_actor::behavior_type node(local_node_actor::stateful_pointer<node_state_data> self,
                                     context_ptr context, engine_port_actor port,
                                     pool_manager_actor pool) {
  set_log_handlers(*self, "node");
  auto& st = self->state;
  st.context = std::move(context);
  st.port = std::move(port);
  st.pool = std::move(pool);
  self->set_down_handler([self](const caf::down_msg& down) { child_ended(self, down); });
  return {
      [self](members_atom, membership& fresh) { adopt(self, fresh); },
      [self](rejoin_atom) {
        self->state.registered = false;
        reach_supervisor(self);
      },
      [self](const link_request& request) { return accept_link(self, request); },
      [self](report_atom) { return make_report(self); },
      [self](call_request& request) { return take_call(self, request); },
      [self](node_command& command) {
        std::visit([self](auto& order) { carry_out(self, order); }, command.what);
      },
      [self](tick_atom) { beat(self); },
  };
}

}  // namespace troupe::actors
