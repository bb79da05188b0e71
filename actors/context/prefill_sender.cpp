#include "troupe/actors/context/prefill_sender.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "troupe/kvcache/block_list.hpp"

namespace troupe::actors {

namespace {

struct prefill_side {
  using state = prefill_sender_state;
  using self_pointer = session_actor::stateful_pointer<state>;
  static constexpr std::string_view log_name = "sender";

  static planned_batch plan(state& st, post_slice& post) {
    auto frame =
        encode(layers_landed{st.basis.transfer, post.slice, post.state, std::move(post.seal)});
    if (!frame) return {{}, frame.error()};
    return plan_batch(st.basis, post, transport::direction::write, std::move(*frame));
  }

  static result<say> prepare_message(state&, send_message& order) {
    return say{std::move(order.message), {}};
  }

  static void offer(self_pointer self, send_offer& order) {
    using shell = session_shell<prefill_side>;
    auto& basis = self->state.basis;
    auto wishes = wish_grants(basis, transport::access::read);
    if (!wishes) {
      shell::later(self, session_event{abort_session{wishes.error()}});
      return;
    }
    transfer_offer offer;
    offer.transfer = basis.transfer;
    offer.token_end = order.slice.token_end;
    name_blocks(basis, offer);
    if (order.state) offer.state_slots = {basis.local_state_slot};
    offer.aux = std::move(order.aux);
    shell::ask_link(self, say{std::move(offer), std::move(*wishes)});
  }

  static void tell(self_pointer, tell_layers&) {}  // the decode side's action

  static session_actions heard(state& st, session_message& message) {
    if (std::holds_alternative<transfer_release>(message)) return st.machine->peer_released();
    if (auto* request = std::get_if<transfer_request>(&message)) {
      if (kept_of(request->groups) != st.basis.kept) {
        return st.machine->local_abort(
            {errc::out_of_range,
             "the repeated request keeps different tokens of a group of layers"});
      }
      const kvcache::token_range tokens{request->token_begin, request->token_end};
      if (st.machine->waits_to_be_asked() && tokens == st.basis.tokens) {
        auto adopted = adopt_destination(st.basis, *request);
        if (!adopted) return st.machine->local_abort(adopted.error());
      }
      return st.machine->asked_again(*request);
    }
    return st.machine->local_abort(out_of_place(st.basis, "decode", message));
  }

  /// The engine counts all layers of its cache, a transfer only those that both sides hold.
  static session_actions grew(state& st, source_progress& more) {
    const auto first = st.basis.geometry->first_local_layer();
    const auto begin = std::max(more.layer_begin, first);
    const auto end = std::min(more.layer_end, first + st.basis.geometry->layers());
    if (begin >= end) return {};
    return st.machine->source_ready(begin - first, end - first, more.token_end);
  }
  static session_actions complete(state& st, source_sealed& seal) {
    return st.machine->sealed(seal.tokens, std::move(seal.aux));
  }
  static session_actions whole(state&) { return {}; }
  static session_actions given_up(state& st, abort_session& abort) {
    return st.machine->local_abort(std::move(abort.why));
  }
};

}  // namespace

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

session_actor::behavior_type prefill_sender(
    session_actor::stateful_pointer<prefill_sender_state> self, prefill_sender_options options) {
  auto& st = self->state;
  st.basis = std::move(options.basis);
  const auto& geometry = *st.basis.geometry;
  send_session::options machine;
  machine.layers = geometry.layers();
  machine.layers_per_batch =
      layers_per_batch(geometry, options.request.token_end - options.request.token_begin);
  machine.has_state = geometry.has_state();
  machine.deadline = options.deadline;
  machine.tokens_at_once = geometry.tokens_at_once();
  st.machine.emplace(std::move(machine));
  return session_shell<prefill_side>::begin(
      self, st.machine->start(options.request, options.ready, options.sealed_tokens,
                              std::move(options.aux)));
}

}  // namespace troupe::actors
