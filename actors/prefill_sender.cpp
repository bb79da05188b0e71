#include "troupe/actors/prefill_sender.hpp"

#include <chrono>
#include <utility>

#include "troupe/actors/inline_unit.hpp"
#include "troupe/actors/logging.hpp"

namespace troupe::actors {

namespace {

using self_pointer = session_actor::stateful_pointer<prefill_sender_state>;

template <class Order>
void ask_link(self_pointer self, Order&& order) {
  self->send(self->state.basis.link.actor, link_command{std::forward<Order>(order)});
}

void carry_out(self_pointer self, session_actions actions);

void act(self_pointer self, post_slice& post) {
  auto& st = self->state;
  auto frame = encode(layers_landed{st.basis.transfer, post.slice, post.state});
  auto batch = plan_batch(st.basis, post, transport::direction::write,
                          frame ? std::move(*frame) : std::vector<std::byte>{});
  if (!batch.failure) {
    ask_link(self, post_batch{std::move(batch.work)});
    return;
  }
  // Through the mailbox, so that the machine is not entered while it is being carried out.
  self->send(caf::actor_cast<session_actor>(self),
             session_event{transport::completion{
                 post.id, st.basis.transfer, std::move(batch.failure), 0, {}}});
}

void act(self_pointer self, send_message& order) {
  ask_link(self, say{std::move(order.message), {}});
}

void act(self_pointer self, send_offer& order) {
  auto& st = self->state;
  auto wishes = wish_grants(st.basis, transport::access::read);
  if (!wishes) {
    self->send(caf::actor_cast<session_actor>(self), session_event{engine_aborts{wishes.error()}});
    return;
  }
  transfer_offer offer;
  offer.transfer = st.basis.transfer;
  offer.token_end = order.slice.token_end;
  offer.blocks = st.basis.local_blocks;
  if (order.state) offer.state_slots = {st.basis.local_state_slot};
  offer.aux = std::move(order.aux);
  ask_link(self, say{std::move(offer), std::move(*wishes)});
}

void act(self_pointer self, fence_transfer&) {
  ask_link(self, fence_now{self->state.basis.transfer});
}

void act(self_pointer, tell_layers&) {}  // the decode side's action

void act(self_pointer self, conclude& outcome) {
  auto& st = self->state;
  log_outcome(st.basis, "sender", outcome.failure);
  self->send(st.basis.port,
             port_event{session_concluded{
                 st.basis.transfer, std::move(outcome.failure), {}, st.basis.bytes}});
}

void act(self_pointer self, unpin&) {
  auto& st = self->state;
  ask_link(self, detach_session{st.basis.transfer});
  self->send(st.basis.port, port_event{session_unpinned{st.basis.transfer}});
  self->quit();
}

void carry_out(self_pointer self, session_actions actions) {
  for (auto& action : actions) {
    std::visit([self](auto& what) { act(self, what); }, action);
  }
}

session_actions happened(prefill_sender_state& st, session_message& message) {
  if (std::holds_alternative<transfer_release>(message)) return st.machine->peer_released();
  if (const auto* abort = std::get_if<transfer_abort>(&message)) {
    return st.machine->peer_aborted({abort->code, abort->reason});
  }
  if (std::holds_alternative<transfer_quiescent>(message)) return {};
  return st.machine->local_abort({errc::internal, "the decode side of " + st.basis.link.peer +
                                                      " sent " + std::string{type_name(message)} +
                                                      ", which only a prefill side may send"});
}

session_actions happened(prefill_sender_state& st, transport::completion& done) {
  st.basis.bytes += done.bytes;
  st.basis.last_byte = std::chrono::steady_clock::now();
  return st.machine->batch_completed(done.id, done.failure);
}

session_actions happened(prefill_sender_state& st, transfer_is_quiescent&) {
  return st.machine->quiescent();
}
session_actions happened(prefill_sender_state& st, link_is_lost& lost) {
  return st.machine->link_lost(std::move(lost.why));
}
session_actions happened(prefill_sender_state& st, source_progress& more) {
  return st.machine->source_ready(more.layer_begin, more.layer_end, more.token_end);
}
session_actions happened(prefill_sender_state& st, source_sealed& seal) {
  return st.machine->sealed(seal.tokens, std::move(seal.aux));
}
session_actions happened(prefill_sender_state& st, engine_aborts& abort) {
  return st.machine->local_abort(std::move(abort.why));
}
session_actions happened(prefill_sender_state& st, deadline_came&) {
  return st.machine->expire(std::chrono::steady_clock::now());
}

}  // namespace

session_actor::behavior_type prefill_sender(
    session_actor::stateful_pointer<prefill_sender_state> self, prefill_sender_options options) {
  auto& st = self->state;
  st.basis = std::move(options.basis);
  adopt_grants(st.basis, std::move(options.request.grants));
  const auto& geometry = *st.basis.geometry;
  if (!geometry.moves_anything()) options.request.token_begin = options.request.token_end;
  send_session::options machine;
  machine.layers = geometry.layers();
  machine.layers_per_batch =
      layers_per_batch(geometry, options.request.token_end - options.request.token_begin);
  machine.has_state = geometry.has_state();
  machine.deadline = options.deadline;
  st.machine.emplace(machine);
  // A link that ended before it heard of this transfer never answers: it granted nothing for it, so
  // that nothing of it can move. After a crash of the link's actor nobody knows; the pins stay.
  self->monitor(st.basis.link.actor);
  self->set_down_handler([self](const caf::down_msg& down) {
    auto& state = self->state;
    carry_out(self, state.machine->link_lost(
                        {errc::peer_lost, "the link to " + state.basis.link.peer + " is gone"}));
    if (!down.reason) carry_out(self, state.machine->quiescent());
  });
  ask_link(self, attach_session{st.basis.transfer, caf::actor_cast<session_actor>(self)});
  carry_out(self, st.machine->start(options.request, options.ready, options.sealed_tokens,
                                    std::move(options.aux)));
  return {[self](session_event& event) {
    auto& state = self->state;
    carry_out(self, std::visit([&state](auto& what) { return happened(state, what); }, event.what));
  }};
}

}  // namespace troupe::actors
