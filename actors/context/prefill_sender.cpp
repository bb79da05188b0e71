#include "troupe/actors/context/prefill_sender.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "troupe/kvcache/block_list.hpp"

namespace troupe::actors {

result<void> adopt_destination(transfer_context& basis, transfer_request& request) {
  if (request.mode == transfer_mode::read) return {};
  const bool moves = basis.tokens.begin < basis.tokens.end;
  if (moves && basis.geometry->has_state() && request.state_slots.empty()) {
    return fail(errc::layout_mismatch, "the model has state tensors, and " + basis.link.peer +
                                           " named no slot for this request");
  }
  if (auto adopted = adopt_remote(basis, {request.blocks, request.groups}, request.state_slots,
                                  std::move(request.grants));
      !adopted) {
    return adopted;
  }
  // Checked here as well as in each plan: tokens of two chunks are in two plans.
  if (const auto twice = repeated_block(basis.geometry->destination_pools(), basis.remote)) {
    return fail(errc::out_of_range, basis.link.peer + " names block " +
                                        std::to_string(twice->value) +
                                        " twice; the blocks of a request must all be different");
  }
  return {};
}

prefill_sender::prefill_sender(prefill_sender_options options)
    : session_shell{"sender", std::move(options.basis)},
      request_{std::move(options.request)},
      ready_{std::move(options.ready)},
      sealed_tokens_{options.sealed_tokens},
      aux_{std::move(options.aux)},
      deadline_{options.deadline} {}

session_actions prefill_sender::start() {
  const auto request = std::move(request_);
  const auto ready = std::move(ready_);
  const auto& geometry = *basis_.geometry;
  send_session::options machine;
  machine.layers = geometry.layers();
  machine.layers_per_batch = layers_per_batch(geometry, request.token_end - request.token_begin);
  machine.has_state = geometry.has_state();
  machine.deadline = deadline_;
  machine.tokens_at_once = geometry.tokens_at_once();
  machine_.emplace(std::move(machine));
  return machine_->start(request, ready, sealed_tokens_, std::move(aux_));
}

planned_batch prefill_sender::plan(post_slice& post) {
  auto frame = encode(layers_landed{basis_.transfer, post.slice, post.state, std::move(post.seal)});
  if (!frame) return {{}, frame.error()};
  return plan_batch(*around_, basis_, post, transport::direction::write, std::move(*frame));
}

void prefill_sender::offer(send_offer& order) {
  auto wishes = wish_grants(basis_, transport::access::read);
  if (!wishes) {
    around_->tell_itself({abort_session{wishes.error()}});
    return;
  }
  transfer_offer offer;
  offer.transfer = basis_.transfer;
  offer.token_end = order.slice.token_end;
  name_blocks(basis_, offer);
  if (order.state) offer.state_slots = {basis_.local_state_slot};
  offer.aux = std::move(order.aux);
  ask_link(*around_, basis_.link, say{std::move(offer), std::move(*wishes)});
}

session_actions prefill_sender::heard(session_message& message) {
  if (std::holds_alternative<transfer_release>(message)) return machine_->peer_released();
  if (auto* request = std::get_if<transfer_request>(&message)) {
    if (kept_of(request->groups) != basis_.kept) {
      return machine_->local_abort(
          {errc::out_of_range, "the repeated request keeps different tokens of a group of layers"});
    }
    const kvcache::token_range tokens{request->token_begin, request->token_end};
    if (machine_->waits_to_be_asked() && tokens == basis_.tokens) {
      auto adopted = adopt_destination(basis_, *request);
      if (!adopted) return machine_->local_abort(adopted.error());
    }
    return machine_->asked_again(*request);
  }
  return machine_->local_abort(out_of_place(basis_, "decode", message));
}

/// The engine counts all layers of its cache, a transfer only those that both sides hold.
session_actions prefill_sender::grew(source_progress& more) {
  const auto first = basis_.geometry->first_local_layer();
  const auto begin = std::max(more.layer_begin, first);
  const auto end = std::min(more.layer_end, first + basis_.geometry->layers());
  if (begin >= end) return {};
  return machine_->source_ready(begin - first, end - first, more.token_end);
}

session_actions prefill_sender::complete(source_sealed& seal) {
  return machine_->sealed(seal.tokens, std::move(seal.aux));
}

}  // namespace troupe::actors
