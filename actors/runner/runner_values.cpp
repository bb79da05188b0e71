#include <utility>

#include "troupe/actors/runner/operation_runner.hpp"
#include "troupe/actors/values/value_client.hpp"
#include "troupe/actors/values/value_regions.hpp"
#include "troupe/actors/values/value_server.hpp"
#include "troupe/kvcache/or_error.hpp"

namespace troupe::actors::operations {

namespace {

decltype(value_concluded::outcome) copied_here(node_context& context, const start_value& put) {
  try {
    return value_here(context, put);
  } catch (...) {
    return event_failed{exception_as_error("the value could not be copied")};
  }
}

}  // namespace

void operation_runner::value_outcome(value_concluded& outcome) {
  if (!tell_last_outcome(outcome.operation, std::move(outcome.outcome))) return;
  around_.tell_pool(pool_command{pool_changed{}});
}

std::optional<waiting_value> operation_runner::no_longer_waits(operation_id operation) {
  const auto found = values_.find(operation);
  if (found == values_.end()) return std::nullopt;
  auto value = std::move(found->second);
  forget_deadline(value.deadline, timer::operation, operation.value);
  values_.erase(found);
  leave_link_line(value.order.peer, operation);
  return value;
}

void operation_runner::fail_value(operation_id operation, troupe::error why) {
  unpin_value(operation);
  value_concluded outcome{operation, event_failed{std::move(why)}};
  value_outcome(outcome);
}

void operation_runner::lose_value(operation_id operation, troupe::error why) {
  value_pins_.erase(operation);  // a peer may be able to read them for ever
  close_values(*context_);
  why.message += ", nor whether the peer still reads it";
  fail_value(operation, std::move(why));
}

void operation_runner::unpin_value(operation_id operation) {
  const auto pinned = value_pins_.find(operation);
  if (pinned == value_pins_.end()) return;
  unpin_blocks("put " + std::to_string(operation.value), pinned->second);
  value_pins_.erase(pinned);
}

void operation_runner::count_copies() {
  context_->counters.local_copies.store(static_cast<std::uint32_t>(copying_.size()));
}

void operation_runner::start_client(waiting_value value, const link_handle& link) {
  const auto operation = value.order.operation;
  const auto transfer = new_transfer();
  auto report = report_of(value.order.key, link, "value", "asked");
  const bool copies = must_copy(value.order, link);
  const bool lends = !copies && is_lent(value.order);
  auto made = std::make_unique<value_client>(
      value_client_options{context_, link, transfer, std::move(value.order)});
  auto touched = made->touched();
  // Not on the thread that runs this, which may be the engine's: the engine computes meanwhile.
  auto client = copies ? around_.begin_session_elsewhere(transfer, link, std::move(made))
                       : around_.begin_session(transfer, link, std::move(made));
  value_clients_.emplace(operation, transfer);
  session_begins(operation, transfer, std::move(client), link, std::move(report), value.deadline,
                 std::move(touched));
  sessions_.at(transfer).lends = lends;
}

void operation_runner::copy_here(start_value& order) {
  const auto operation = order.operation;
  around_.do_elsewhere([context = context_, put = std::move(order)] {
    return runner_event{value_concluded{put.operation, copied_here(*context, put)}};
  });
  copying_.insert(operation);
  count_copies();
}

void operation_runner::on_start_value(start_value& order) {
  if (!order.pinned.empty()) value_pins_.emplace(order.operation, order.pinned);
  if (stopping_) {
    fail_value(order.operation, {errc::aborted, "the node stops"});
    return;
  }
  if (order.peer == context_->self.name) {
    if (order.verb == value_verb::put && order.value.size() > max_inline) {
      copy_here(order);
      return;
    }
    value_concluded outcome{order.operation, value_here(*context_, order)};
    unpin_value(order.operation);
    value_outcome(outcome);
    return;
  }
  waiting_value value{std::move(order), around_.now() + context_->settings.default_deadline};
  if (const auto link = links_.find(value.order.peer); link != links_.end()) {
    start_client(std::move(value), link->second);
    return;
  }
  const auto operation = value.order.operation;
  wait_for_link(value.order.peer, operation);
  deadlines_.emplace(value.deadline, timer::operation, operation.value);
  values_.emplace(operation, std::move(value));
}

void operation_runner::on_value_concluded(value_concluded& outcome) {
  value_clients_.erase(outcome.operation);
  if (copying_.erase(outcome.operation) != 0) unpin_value(outcome.operation);
  value_outcome(outcome);
  count_copies();  // the outcome was told before: `stop` waits for the count
}

void operation_runner::value_came(const link_handle& link, session_message& message) {
  if (auto reply = answer_value(*context_, message)) {
    // Small enough for one frame, or refused: no actor needed.
    say_over(link, std::move(*reply));
    around_.tell_pool(pool_command{pool_changed{}});
    return;
  }
  const auto transfer = route_of(message);
  if (sessions_.contains(transfer)) {
    const troupe::error why{errc::already_exists, "that operation is live here"};
    say_over(link, refused_value(transfer.value, why));
    return;
  }
  if (auto served = room_to_serve(); !served) {
    say_over(link, refused_value(transfer.value, served.error()));
    return;
  }
  const auto* put = std::get_if<store_put>(&message);
  const auto& key = put != nullptr ? put->key : std::get<store_get>(message).key;
  auto report = report_of(key, link, "serve", "answering");
  auto made =
      std::make_unique<value_server>(value_server_options{context_, link, std::move(message)});
  auto touched = made->touched();
  auto server = around_.begin_session(transfer, link, std::move(made));
  // By then the peer has given up at its own deadline and, if it lives, has said so. That message
  // may be lost, and a peer that forgot its request sends none.
  session_begins(operation_id{}, transfer, std::move(server), link, std::move(report),
                 deadline_after({}) + context_->settings.peer_silence, std::move(touched));
}

}  // namespace troupe::actors::operations
