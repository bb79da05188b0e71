#include <utility>

#include "troupe/actors/engine_port_parts.hpp"
#include "troupe/actors/inline_unit.hpp"
#include "troupe/actors/value_client.hpp"
#include "troupe/actors/value_server.hpp"

namespace troupe::actors::port {

namespace {

void value_outcome(engine_port_state& st, value_concluded& outcome) {
  if (!st.context->operations.end(outcome.operation)) return;
  std::visit(
      [&](auto& what) {
        st.context->events.push({outcome.operation, std::move(what)});
      },
      outcome.outcome);
  tell(st.pool, pool_command{pool_changed{}});
}

}  // namespace

std::optional<start_value> no_longer_waits(engine_port_state& st, operation_id operation) {
  const auto found = st.values.find(operation);
  if (found == st.values.end()) return std::nullopt;
  auto order = std::move(found->second.order);
  forget_deadline(st, found->second.deadline, timer::operation, operation.value);
  st.values.erase(found);
  if (const auto line = st.waiting_for_link.find(order.peer); line != st.waiting_for_link.end()) {
    std::erase(line->second, operation);
    if (line->second.empty()) st.waiting_for_link.erase(line);
  }
  return order;
}

void fail_value(engine_port_state& st, operation_id operation, troupe::error why) {
  value_concluded outcome{operation, {}, event_failed{std::move(why)}};
  value_outcome(st, outcome);
}

void start_client(self_pointer self, start_value order, const link_handle& link) {
  auto& st = self->state;
  const auto operation = order.operation;
  const auto transfer = new_transfer(st);
  transfer_report report;
  report.request = order.key;
  report.peer = link.peer;
  report.side = "value";
  report.state = "asked";
  auto client = self->spawn<caf::monitored>(
      value_client, value_client_options{st.context, caf::actor_cast<engine_port_actor>(self), link,
                                         transfer, std::move(order)});
  st.value_clients.emplace(operation, transfer);
  session_begins(st, operation, transfer, std::move(client), link, std::move(report),
                 now() + st.context->settings.default_deadline);
}

void carry_out(self_pointer self, start_value& order) {
  auto& st = self->state;
  if (order.peer == st.context->self.name) {
    value_concluded outcome{order.operation, {}, value_here(*st.context, order)};
    value_outcome(st, outcome);
    return;
  }
  if (const auto link = st.links.find(order.peer); link != st.links.end()) {
    start_client(self, std::move(order), link->second);
    return;
  }
  auto& waiting = st.waiting_for_link[order.peer];
  waiting.push_back(order.operation);
  const auto peer = order.peer;
  const bool first = waiting.size() == 1;
  const auto deadline = now() + st.context->settings.default_deadline;
  st.deadlines.emplace(deadline, timer::operation, order.operation.value);
  const auto operation = order.operation;
  st.values.emplace(operation, engine_port_state::waiting_value{std::move(order), deadline});
  if (first) ask_for_link(st, peer);
}

void happened(self_pointer self, value_concluded& outcome) {
  auto& st = self->state;
  st.value_clients.erase(outcome.operation);
  value_outcome(st, outcome);
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
    refuse_request(link, transfer, {errc::already_exists, "that operation is live here"});
    return;
  }
  transfer_report report;
  report.request = std::visit(
      []<class Message>(const Message& m) -> std::string {
        if constexpr (requires { m.key; }) {
          return m.key;
        } else {
          return {};
        }
      },
      message);
  report.peer = link.peer;
  report.side = "serve";
  report.state = "answering";
  auto server = self->spawn<caf::monitored>(
      value_server, value_server_options{st.context, caf::actor_cast<engine_port_actor>(self),
                                         st.pool, link, std::move(message)});
  // The pin of a value is its reader's for as long as that lives.
  session_begins(st, operation_id{}, transfer, std::move(server), link, std::move(report),
                 no_deadline);
}

}  // namespace troupe::actors::port
