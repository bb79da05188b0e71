#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <utility>

#include "troupe/actors/base/message_fields.hpp"
#include "troupe/actors/node/node_parts.hpp"
#include "troupe/actors/runtime/inline_executor.hpp"

namespace troupe::actors::node_parts {

namespace {

/// Answers a call once, even if the engine drops it. The engine may keep it for longer than there is
/// a node: it does not keep the node's actor, whose thread would not end.
class call_answer {
 public:
  call_answer(caf::actor_addr node, std::uint64_t id) : node_{std::move(node)}, id_{id} {}
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
    const auto node = caf::actor_cast<caf::strong_actor_ptr>(node_);
    if (!node) return;
    tell(caf::actor_cast<local_node_actor>(node),
         node_command{call_answered{id_, std::move(reply)}});
  }

 private:
  caf::actor_addr node_;
  std::uint64_t id_;
  std::atomic<bool> given_{false};
};

void fail_placement(node_state_data& st, operation_id operation, troupe::error why) {
  st.placements.erase(operation);
  if (st.context->operations.end(operation)) {
    st.context->events.push_last({operation, event_failed{std::move(why)}});
  }
}

/// Else its place in the queues would be taken for as long as the node that it was placed on lives.
void tell_ended(self_pointer self, std::string request) {
  auto& st = self->state;
  if (st.supervisor) {
    self->send(st.supervisor, finished_atom::value, std::move(request));
    return;
  }
  st.untold.push_back(std::move(request));
  if (st.untold.size() > max_untold) st.untold.pop_front();
}

/// A placement that nobody waits for any more was made: its place in the queues is free. Another
/// one of the same request has taken the first one's place there.
void give_back_placement(self_pointer self, const std::string& request) {
  auto& st = self->state;
  const bool asked_again = std::ranges::any_of(
      st.placements, [&](const auto& waiting) { return waiting.second.request == request; });
  if (!asked_again) tell_ended(self, request);
}

}  // namespace

// -- calls of frontends

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
    const auto deadline =
        request.timeout_ms == 0
            ? time_point::max()
            : std::chrono::steady_clock::now() + std::chrono::milliseconds{request.timeout_ms};
    st.calls.emplace(id, node_state_data::pending_call{promise, deadline});
    auto answer = std::make_shared<call_answer>(self->address(), id);
    try {
      st.context->on_call(call{
          std::move(request.method), std::move(request.payload), deadline,
          [answer](result<std::vector<std::uint8_t>> reply) { answer->give(std::move(reply)); }});
    } catch (const std::exception& thrown) {
      answer->give(
          fail(errc::internal, std::string{"the engine threw at the call: "} + thrown.what()));
    }
  }
  return promise;
}

void on_call_answered(self_pointer self, call_answered& order) {
  auto& st = self->state;
  const auto found = st.calls.find(order.call);
  if (found == st.calls.end()) return;
  found->second.promise.deliver(std::move(order.reply));
  st.calls.erase(found);
}

void expire_calls(node_state_data& st) {
  const auto now = std::chrono::steady_clock::now();
  for (auto one = st.calls.begin(); one != st.calls.end();) {
    if (one->second.deadline > now) {
      ++one;
      continue;
    }
    one->second.promise.deliver(call_reply{static_cast<std::uint8_t>(errc::deadline),
                                           "the engine did not answer the call in time",
                                           {}});
    one = st.calls.erase(one);
  }
}

// -- placements

void on_start_place(self_pointer self, start_place& order) {
  const auto& context = self->state.context;
  const auto failed = [self, operation = order.operation](errc code, std::string sentence) {
    fail_placement(self->state, operation, {code, std::move(sentence)});
  };
  if (!self->state.supervisor) {
    failed(errc::peer_unreachable, "the supervisor cannot be reached: " + self->state.refusal);
    return;
  }
  // Those that were given up count until the supervisor has answered.
  if (self->state.placements.size() >= context->settings.max_operations) {
    failed(errc::overloaded, "the supervisor has not answered " +
                                 std::to_string(self->state.placements.size()) +
                                 " placements, which is limits.max_operations");
    return;
  }
  const auto patience = std::chrono::milliseconds{order.request.timeout_ms} +
                        context->settings.heartbeat_interval * 2;
  self->state.placements.emplace(
      order.operation, node_state_data::pending_placement{
                           order.request.request, std::chrono::steady_clock::now() + patience});
  // Our own clock looks at the deadline: CAF keeps a request's timer, and what hangs on it, until it
  // runs out, also when the answer came long before.
  self->request(self->state.supervisor, caf::infinite, place_atom::value, order.request)
      .then(
          [self, context, failed, operation = order.operation](placement& where) {
            self->state.placements.erase(operation);
            if (where.failed != 0) {
              auto why = refusal(where);
              failed(why.code, std::move(why.message));
            } else if (auto wrong = wrong_mode(where)) {
              give_back_placement(self, where.request);
              failed(wrong->code, std::move(wrong->message));
            } else if (context->operations.end(operation)) {
              context->events.push_last({operation, event_placed{std::move(where)}});
            } else {
              give_back_placement(self, where.request);
            }
          },
          [self, failed](const caf::error& err) {
            failed(errc::peer_lost,
                   "the supervisor did not answer (" + self->system().render(err) + ")");
          });
}

void on_placed_ended(self_pointer self, placed_ended& order) {
  tell_ended(self, std::move(order.request));
}

void tell_untold(self_pointer self) {
  for (auto& request : std::exchange(self->state.untold, {})) tell_ended(self, std::move(request));
}

void fail_placements(node_state_data& st, const troupe::error& why) {
  for (const auto& [operation, asked] : std::exchange(st.placements, {})) {
    fail_placement(st, operation, why);
  }
}

void expire_placements(self_pointer self) {
  auto& st = self->state;
  const auto now = std::chrono::steady_clock::now();
  for (auto one = st.placements.begin(); one != st.placements.end();) {
    const auto current = one++;
    if (current->second.deadline > now) continue;
    const auto request = std::move(current->second.request);
    fail_placement(st, current->first, {errc::deadline, "the supervisor did not answer in time"});
    give_back_placement(self, request);
  }
}

}  // namespace troupe::actors::node_parts
