#include <utility>

#include <caf/event_based_actor.hpp>

#include "troupe/actors/port/engine_port_parts.hpp"
#include "troupe/actors/runtime/inline_executor.hpp"
#include "troupe/actors/values/value_client.hpp"
#include "troupe/actors/values/value_regions.hpp"
#include "troupe/actors/values/value_server.hpp"

namespace troupe::actors::port {

namespace {

void value_outcome(engine_port_state& st, value_concluded& outcome) {
  if (!tell_last_outcome(st, outcome.operation, std::move(outcome.outcome))) return;
  tell(st.pool, pool_command{pool_changed{}});
}

}  // namespace

std::optional<waiting_value> no_longer_waits(engine_port_state& st, operation_id operation) {
  const auto found = st.values.find(operation);
  if (found == st.values.end()) return std::nullopt;
  auto value = std::move(found->second);
  forget_deadline(st, value.deadline, timer::operation, operation.value);
  st.values.erase(found);
  leave_link_line(st, value.order.peer, operation);
  return value;
}

void fail_value(engine_port_state& st, operation_id operation, troupe::error why) {
  unpin_value(st, operation);
  value_concluded outcome{operation, event_failed{std::move(why)}};
  value_outcome(st, outcome);
}

void lose_value(engine_port_state& st, operation_id operation, troupe::error why) {
  st.value_pins.erase(operation);  // a peer may read them for ever
  close_values(*st.context);
  why.message += "; if it was a put, it is not known whether the value is stored";
  fail_value(st, operation, std::move(why));
}

void unpin_value(engine_port_state& st, operation_id operation) {
  const auto pinned = st.value_pins.find(operation);
  if (pinned == st.value_pins.end()) return;
  unpin_blocks(st, "put " + std::to_string(operation.value), pinned->second);
  st.value_pins.erase(pinned);
}

namespace {

void count_copies(engine_port_state& st) {
  st.context->counters.local_copies.store(static_cast<std::uint32_t>(st.copying.size()));
}

/// On a thread of the scheduler's, as every copy, not on the caller's, which the port may run on: the engine computes
/// meanwhile.
session_actor spawn_copying_client(self_pointer self, value_client_options options) {
  auto client = self->system().spawn(value_client, std::move(options));
  self->monitor(client);
  return client;
}

decltype(value_concluded::outcome) copied_here(node_context& context, const start_value& put) {
  try {
    return value_here(context, put);
  } catch (const std::exception& why) {
    return event_failed{
        {errc::pool_exhausted, std::string{"the value could not be copied: "} + why.what()}};
  }
}

}  // namespace

void start_client(self_pointer self, waiting_value value, const link_handle& link) {
  auto& st = self->state;
  const auto operation = value.order.operation;
  const auto transfer = new_transfer(st);
  auto report = report_of(value.order.key, link, "value", "asked");
  const bool copies = must_copy(value.order, link);
  value_client_options options{st.context, caf::actor_cast<engine_port_actor>(self), link, transfer,
                               std::move(value.order)};
  auto client = copies ? spawn_copying_client(self, std::move(options))
                       : self->spawn<caf::monitored>(value_client, std::move(options));
  st.value_clients.emplace(operation, transfer);
  session_begins(st, operation, transfer, std::move(client), link, std::move(report),
                 value.deadline);
}

namespace {

void copy_here(self_pointer self, start_value& order) {
  auto& st = self->state;
  const auto operation = order.operation;
  const auto body = [](caf::event_based_actor* copier, const context_ptr& context,
                       const engine_port_actor& port, const start_value& put) {
    copier->send(port, port_event{value_concluded{put.operation, copied_here(*context, put)}});
  };
  self->system().spawn(body, st.context, caf::actor_cast<engine_port_actor>(self),
                       std::move(order));
  st.copying.insert(operation);
  count_copies(st);
}

}  // namespace

void on_start_value(self_pointer self, start_value& order) {
  auto& st = self->state;
  if (!order.pinned.empty()) st.value_pins.emplace(order.operation, order.pinned);
  if (st.stopping) {
    fail_value(st, order.operation, {errc::aborted, "the node stops"});
    return;
  }
  if (order.peer == st.context->self.name) {
    if (order.verb == value_verb::put && order.value.size() > max_inline) {
      copy_here(self, order);
      return;
    }
    value_concluded outcome{order.operation, value_here(*st.context, order)};
    unpin_value(st, order.operation);
    value_outcome(st, outcome);
    return;
  }
  waiting_value value{std::move(order), now() + st.context->settings.default_deadline};
  if (const auto link = st.links.find(value.order.peer); link != st.links.end()) {
    start_client(self, std::move(value), link->second);
    return;
  }
  const auto operation = value.order.operation;
  wait_for_link(st, value.order.peer, operation);
  st.deadlines.emplace(value.deadline, timer::operation, operation.value);
  st.values.emplace(operation, std::move(value));
}

void on_value_concluded(self_pointer self, value_concluded& outcome) {
  auto& st = self->state;
  st.value_clients.erase(outcome.operation);
  if (st.copying.erase(outcome.operation) != 0) unpin_value(st, outcome.operation);
  value_outcome(st, outcome);
  count_copies(st);  // told before: `stop` waits for the count
}

void value_came(self_pointer self, const link_handle& link, session_message& message) {
  auto& st = self->state;
  if (auto reply = answer_value(*st.context, message)) {
    // Small enough for one frame, or refused: no actor needed.
    tell(link.actor, link_command{say{std::move(*reply), {}}});
    tell(st.pool, pool_command{pool_changed{}});
    return;
  }
  const auto transfer = route_of(message);
  if (st.sessions.contains(transfer)) {
    const troupe::error why{errc::already_exists, "that operation is live here"};
    tell(link.actor, link_command{say{refused_value(transfer.value, why), {}}});
    return;
  }
  if (auto served = room_to_serve(st); !served) {
    tell(link.actor, link_command{say{refused_value(transfer.value, served.error()), {}}});
    return;
  }
  const auto* put = std::get_if<store_put>(&message);
  const auto& key = put != nullptr ? put->key : std::get<store_get>(message).key;
  auto report = report_of(key, link, "serve", "answering");
  auto server = self->spawn<caf::monitored>(
      value_server, value_server_options{st.context, caf::actor_cast<engine_port_actor>(self),
                                         st.pool, link, std::move(message)});
  // Whoever asked has given up by then, at its own deadline, and has said so if it lives. What it says
  // may be lost, and nobody says anything for one that forgot.
  session_begins(st, operation_id{}, transfer, std::move(server), link, std::move(report),
                 deadline_after(st, {}) + st.context->settings.peer_silence);
}

}  // namespace troupe::actors::port
