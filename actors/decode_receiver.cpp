#include "troupe/actors/decode_receiver.hpp"

#include <chrono>
#include <utility>

#include "troupe/actors/inline_unit.hpp"
#include "troupe/actors/logging.hpp"

namespace troupe::actors {

namespace {

using self_pointer = session_actor::stateful_pointer<decode_receiver_state>;

template <class Order>
void ask_link(self_pointer self, Order&& order) {
  self->send(self->state.basis.link.actor, link_command{std::forward<Order>(order)});
}

void act(self_pointer self, post_slice& post) {
  auto& st = self->state;
  auto batch = plan_batch(st.basis, post, transport::direction::read, {});
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
  auto& st = self->state;
  say what{std::move(order.message), {}};
  const auto* request = std::get_if<transfer_request>(&what.message);
  if (request != nullptr && request->mode == transfer_mode::write &&
      request->token_begin < request->token_end) {
    auto wishes = wish_grants(st.basis, transport::access::write);
    if (!wishes) {
      self->send(caf::actor_cast<session_actor>(self),
                 session_event{engine_aborts{wishes.error()}});
      return;
    }
    what.grants = std::move(*wishes);
  }
  ask_link(self, std::move(what));
}

void act(self_pointer, send_offer&) {}  // the prefill side's action

void act(self_pointer self, fence_transfer&) {
  ask_link(self, fence_now{self->state.basis.transfer});
}

void act(self_pointer self, tell_layers& layers) {
  auto& st = self->state;
  self->send(st.basis.port, port_event{session_layers{st.basis.transfer, layers.slice}});
}

void act(self_pointer self, conclude& outcome) {
  auto& st = self->state;
  log_outcome(st.basis, "receiver", outcome.failure);
  self->send(st.basis.port,
             port_event{session_concluded{st.basis.transfer, std::move(outcome.failure),
                                          std::move(outcome.aux), st.basis.bytes}});
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

/// Bytes of a slice that landed: the prefill side counts its posts, this side what it was told of.
void count_landed(session_basis& basis, const cache_slice& slice) {
  const auto now = std::chrono::steady_clock::now();
  if (basis.first_byte == time_point{}) basis.first_byte = now;
  basis.last_byte = now;
  const auto& geometry = *basis.geometry;
  if (geometry.layers() == 0) return;
  basis.bytes += geometry.bytes_per_token() * (slice.token_end - slice.token_begin) *
                 (slice.layer_end - slice.layer_begin) / geometry.layers();
}

session_actions happened(decode_receiver_state& st, session_message& message) {
  if (const auto* landed = std::get_if<layers_landed>(&message)) {
    auto actions = st.machine->landed(*landed);
    if (st.machine->current() != receive_session::state::finished)
      count_landed(st.basis, landed->slice);
    return actions;
  }
  if (const auto* sealed = std::get_if<transfer_sealed>(&message))
    return st.machine->sealed(*sealed);
  if (auto* offer = std::get_if<transfer_offer>(&message)) {
    adopt_grants(st.basis, std::move(offer->grants));
    st.basis.remote_blocks = offer->blocks;
    if (!offer->state_slots.empty()) st.basis.remote_state_slot = offer->state_slots.front();
    return st.machine->offered(*offer);
  }
  if (const auto* abort = std::get_if<transfer_abort>(&message)) {
    return st.machine->peer_aborted({abort->code, abort->reason});
  }
  if (std::holds_alternative<transfer_quiescent>(message)) return {};
  return st.machine->local_abort({errc::internal, "the prefill side of " + st.basis.link.peer +
                                                      " sent " + std::string{type_name(message)} +
                                                      ", which only a decode side may send"});
}

session_actions happened(decode_receiver_state& st, transport::completion& done) {
  st.basis.bytes += done.bytes;
  st.basis.last_byte = std::chrono::steady_clock::now();
  return st.machine->batch_completed(done.id, done.failure);
}

session_actions happened(decode_receiver_state& st, transfer_is_quiescent&) {
  return st.machine->quiescent();
}
session_actions happened(decode_receiver_state& st, link_is_lost& lost) {
  return st.machine->link_lost(std::move(lost.why));
}
session_actions happened(decode_receiver_state&, source_progress&) {
  return {};
}
session_actions happened(decode_receiver_state&, source_sealed&) {
  return {};
}
session_actions happened(decode_receiver_state& st, engine_aborts& abort) {
  return st.machine->local_abort(std::move(abort.why));
}
session_actions happened(decode_receiver_state& st, deadline_came&) {
  return st.machine->expire(std::chrono::steady_clock::now());
}

}  // namespace

session_actor::behavior_type decode_receiver(
    session_actor::stateful_pointer<decode_receiver_state> self, decode_receiver_options options) {
  auto& st = self->state;
  st.basis = std::move(options.basis);
  const auto& geometry = *st.basis.geometry;
  if (!geometry.moves_anything()) options.request.token_begin = options.request.token_end;
  receive_session::options machine;
  machine.layers = geometry.layers();
  machine.layers_per_batch =
      layers_per_batch(geometry, options.request.token_end - options.request.token_begin);
  machine.has_state = geometry.has_state();
  machine.deadline = options.deadline;
  st.machine.emplace(machine, std::move(options.request));
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
  carry_out(self, st.machine->start());
  return {[self](session_event& event) {
    auto& state = self->state;
    carry_out(self, std::visit([&state](auto& what) { return happened(state, what); }, event.what));
  }};
}

}  // namespace troupe::actors
