#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <utility>

#include "troupe/actors/base/message_fields.hpp"
#include "troupe/actors/node/node_core.hpp"
#include "troupe/actors/runtime/inline_executor.hpp"
#include "troupe/kvcache/or_error.hpp"
#include "troupe/kvcache/or_undo.hpp"

namespace troupe::actors::nodes {

namespace {

/// Answers a call once, even if the engine drops it. The engine may keep it for longer than the
/// node exists, so it does not hold the node's actor: that actor's thread would not end.
class call_answer {
 public:
  call_answer(caf::actor_addr node, std::uint64_t id) : node_{std::move(node)}, id_{id} {}
  ~call_answer() {
    (void)or_error("a call is answered",
                   [this] { give(fail(errc::aborted, "the engine dropped the call")); });
  }
  call_answer(const call_answer&) = delete;
  call_answer& operator=(const call_answer&) = delete;

  /// The first answer counts. One that finds no memory is none: another may follow.
  void give(result<std::vector<std::uint8_t>> answer) {
    if (given_.exchange(true)) return;
    or_undo([&] { send(std::move(answer)); }, [this] { given_ = false; });
  }

 private:
  void send(result<std::vector<std::uint8_t>> answer) const {
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

  caf::actor_addr node_;
  std::uint64_t id_;
  std::atomic<bool> given_{false};
};

}  // namespace

void node_core::fail_placement(operation_id operation, troupe::error why) {
  placements_.erase(operation);
  (void)context_->events.conclude({operation, event_failed{std::move(why)}});
}

/// Tells the supervisor that a placed request ended. Without this its place in the queues would
/// stay taken for as long as the node that it was placed on lives.
void node_core::tell_placed_request_ended(std::string request) {
  if (supervisor_) {
    self_->send(supervisor_, placed_request_ended_atom::value, std::move(request));
    return;
  }
  untold_.push_back(std::move(request));
  if (untold_.size() > max_untold) untold_.pop_front();
}

/// A placement was made that nobody waits for any more: frees its place in the queues, unless the
/// same request was asked for again, which took that place over.
void node_core::give_back_placement(const std::string& request) {
  const bool asked_again = std::ranges::any_of(
      placements_, [&](const auto& waiting) { return waiting.second.request == request; });
  if (!asked_again) tell_placed_request_ended(request);
}

// -- calls of frontends

caf::typed_response_promise<call_reply> node_core::take_call(call_request& request) {
  auto promise = self_->make_response_promise<call_reply>();
  const auto refuse = [&](errc code, std::string sentence) {
    promise.deliver(call_reply{static_cast<std::uint8_t>(code), std::move(sentence), {}});
  };
  if (!context_->on_call) {
    refuse(errc::not_found, "no engine takes calls at " + context_->self.name);
  } else if (request.payload.size() > max_call_bytes) {
    refuse(errc::out_of_range,
           "a call carries at most " + std::to_string(max_call_bytes) + " bytes");
  } else if (calls_.size() >= max_pending_calls) {
    refuse(errc::overloaded, "too many calls wait for the engine of " + context_->self.name);
  } else {
    const auto id = next_call_++;
    const auto deadline =
        request.timeout_ms == 0
            ? time_point::max()
            : std::chrono::steady_clock::now() + std::chrono::milliseconds{request.timeout_ms};
    calls_.emplace(id, pending_call{promise, deadline});
    auto answer = std::make_shared<call_answer>(self_->address(), id);
    try {
      context_->on_call(call{
          std::move(request.method), std::move(request.payload), deadline,
          [answer](result<std::vector<std::uint8_t>> reply) { answer->give(std::move(reply)); }});
    } catch (const std::exception& thrown) {
      answer->give(fail(errc::internal, std::string{"the engine threw an exception on the call: "} +
                                            thrown.what()));
    }
  }
  return promise;
}

void node_core::on_call_answered(call_answered& order) {
  const auto found = calls_.find(order.call);
  if (found == calls_.end()) return;
  found->second.promise.deliver(std::move(order.reply));
  calls_.erase(found);
}

void node_core::expire_calls() {
  const auto now = std::chrono::steady_clock::now();
  for (auto one = calls_.begin(); one != calls_.end();) {
    if (one->second.deadline > now) {
      ++one;
      continue;
    }
    one->second.promise.deliver(call_reply{static_cast<std::uint8_t>(errc::deadline),
                                           "the engine did not answer the call in time",
                                           {}});
    one = calls_.erase(one);
  }
}

// -- placements

void node_core::on_start_place(start_place& order) {
  const auto& context = context_;
  const auto failed = [this, operation = order.operation](errc code, std::string sentence) {
    fail_placement(operation, {code, std::move(sentence)});
  };
  if (!supervisor_) {
    failed(errc::peer_unreachable, "the supervisor cannot be reached: " + refusal_);
    return;
  }
  // Placements that were given up count until the supervisor has answered.
  if (placements_.size() >= context->settings.max_operations) {
    failed(errc::overloaded, "the supervisor has not answered " +
                                 std::to_string(placements_.size()) +
                                 " placements, which is limits.max_operations");
    return;
  }
  const auto patience = std::chrono::milliseconds{order.request.timeout_ms} +
                        context->settings.heartbeat_interval * 2;
  placements_.emplace(
      order.operation,
      pending_placement{order.request.request, std::chrono::steady_clock::now() + patience});
  // We check the deadline ourselves: CAF keeps a request's timer, and what it references, until it
  // runs out, even if the answer came long before.
  self_->request(supervisor_, caf::infinite, place_atom::value, order.request)
      .then(
          [this, context, failed, operation = order.operation](placement& where) {
            placements_.erase(operation);
            if (where.failed != 0) {
              auto why = refusal(where);
              failed(why.code, std::move(why.message));
            } else if (auto wrong = wrong_mode(where)) {
              give_back_placement(where.request);
              failed(wrong->code, std::move(wrong->message));
            } else if (auto request = where.request;
                       !context->events.conclude({operation, event_placed{std::move(where)}})) {
              give_back_placement(request);
            }
          },
          [this, failed](const caf::error& err) {
            failed(errc::peer_lost,
                   "the supervisor did not answer (" + self_->system().render(err) + ")");
          });
}

void node_core::tell_untold() {
  for (auto& request : std::exchange(untold_, {})) tell_placed_request_ended(std::move(request));
}

void node_core::fail_placements(const troupe::error& why) {
  for (const auto& [operation, asked] : std::exchange(placements_, {})) {
    fail_placement(operation, why);
  }
}

void node_core::expire_placements() {
  const auto now = std::chrono::steady_clock::now();
  for (auto one = placements_.begin(); one != placements_.end();) {
    const auto current = one++;
    if (current->second.deadline > now) continue;
    const auto request = std::move(current->second.request);
    fail_placement(current->first, {errc::deadline, "the supervisor did not answer in time"});
    give_back_placement(request);
  }
}

}  // namespace troupe::actors::nodes
