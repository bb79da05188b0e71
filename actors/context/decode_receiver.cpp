#include "troupe/actors/context/decode_receiver.hpp"

#include <chrono>
#include <utility>

#include "troupe/actors/base/message_fields.hpp"

namespace troupe::actors {

namespace {

/// Counts the bytes of a slice that landed: the prefill side counts its posts, this side what it
/// was told of.
void count_landed(transfer_context& basis, const cache_slice& slice) {
  const auto now = std::chrono::steady_clock::now();
  if (basis.first_byte == time_point{}) basis.first_byte = now;
  basis.last_byte = now;
  basis.bytes += basis.geometry->bytes_of({slice.layer_begin, slice.layer_end},
                                          {slice.token_begin, slice.token_end}, basis.kept);
}

/// Adopts the blocks that the prefill side offers; it must offer exactly the groups it was asked
/// for.
result<void> adopt_offer(transfer_context& basis, transfer_offer& offer) {
  if (auto fine = check_groups(*basis.context->layout, offer.groups); !fine) return fine;
  if (const auto kept = kept_of(offer.groups); kept != basis.kept) {
    return fail(
        errc::out_of_range,
        basis.link.peer + " offers different tokens of a group of layers than were asked for");
  }
  return adopt_remote(basis, {offer.blocks, offer.groups}, offer.state_slots,
                      std::move(offer.grants));
}

struct decode_side {
  using state = decode_receiver_state;
  using self_pointer = session_actor::stateful_pointer<state>;
  static constexpr std::string_view log_name = "receiver";

  static planned_batch plan(state& st, post_slice& post) {
    return plan_batch(st.basis, post, transport::direction::read, {});
  }

  static result<say> prepare_message(state& st, send_message& order) {
    say what{std::move(order.message), {}};
    // The engine is told of its blocks first, which is one system call earlier.
    what.may_be_delayed = std::holds_alternative<transfer_release>(what.message);
    auto* request = std::get_if<transfer_request>(&what.message);
    if (request == nullptr) return what;
    // When sent again over the next link, the two times stay the same.
    const auto left_until = [now = std::chrono::steady_clock::now()](time_point then) {
      return std::chrono::duration_cast<std::chrono::milliseconds>(then - now);
    };
    request->deadline_ms = whole_ms(left_until(st.deadline));
    if (st.park_until) {
      const auto left = left_until(*st.park_until);
      request->park_ms = left.count() > 0 ? whole_ms(left) : 0;
    }
    if (request->mode != transfer_mode::write || request->token_begin >= request->token_end) {
      return what;
    }
    auto wishes = wish_grants(st.basis, transport::access::write);
    if (!wishes) return fail(wishes.error());
    what.grants = std::move(*wishes);
    return what;
  }

  static void offer(self_pointer, send_offer&) {}  // the prefill side's action

  static void tell(self_pointer self, tell_layers& layers) {
    auto& basis = self->state.basis;
    // The engine counts all layers of its cache, a transfer only those that both sides hold.
    auto slice = layers.slice;
    slice.layer_begin += basis.geometry->first_local_layer();
    slice.layer_end += basis.geometry->first_local_layer();
    self->send(basis.port, port_event{session_layers{basis.transfer, slice}});
  }

  static session_actions heard(state& st, session_message& message) {
    if (const auto* landed = std::get_if<layers_landed>(&message)) {
      auto actions = st.machine->landed(*landed);
      if (st.machine->current() != receive_session::state::finished)
        count_landed(st.basis, landed->slice);
      return actions;
    }
    if (const auto* sealed = std::get_if<transfer_sealed>(&message))
      return st.machine->sealed(*sealed);
    if (auto* offer = std::get_if<transfer_offer>(&message)) {
      if (st.machine->expects_offer()) {
        auto adopted = adopt_offer(st.basis, *offer);
        if (!adopted) return st.machine->local_abort(adopted.error());
      }
      return st.machine->offered(*offer);
    }
    return st.machine->local_abort(out_of_place(st.basis, "prefill", message));
  }

  static session_actions grew(state&, source_progress&) { return {}; }
  static session_actions complete(state&, source_sealed&) { return {}; }
  static session_actions whole(state& st) { return st.machine->received_whole(); }
  static session_actions given_up(state& st, abort_session& abort) {
    return abort.refused ? st.machine->refused_elsewhere(std::move(abort.why))
                         : st.machine->local_abort(std::move(abort.why));
  }
};

}  // namespace

session_actor::behavior_type decode_receiver(
    session_actor::stateful_pointer<decode_receiver_state> self, decode_receiver_options options) {
  auto& st = self->state;
  st.basis = std::move(options.basis);
  st.deadline = options.deadline;
  st.park_until = options.park_until;
  const auto& geometry = *st.basis.geometry;
  auto& request = options.request;
  if (!geometry.moves_anything()) request.token_begin = request.token_end;
  st.basis.tokens = {request.token_begin, request.token_end};
  // In read mode the prefill side writes nothing and needs no destination.
  name_blocks(st.basis, request, request.mode == transfer_mode::write);
  receive_session::options machine;
  machine.layers = geometry.layers();
  machine.layers_per_batch = layers_per_batch(geometry, request.token_end - request.token_begin);
  machine.has_state = geometry.has_state();
  machine.deadline = options.deadline;
  st.machine.emplace(machine, std::move(request));
  return session_shell<decode_side>::begin(self, st.machine->start());
}

}  // namespace troupe::actors
