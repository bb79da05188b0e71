#include "troupe/actors/context/decode_receiver.hpp"

#include <chrono>
#include <utility>

#include "troupe/actors/base/message_fields.hpp"

namespace troupe::actors {

namespace {

/// Counts the bytes of a slice that landed: the prefill side counts its posts, this side what it
/// was told of.
void count_landed(transfer_context& basis, const cache_slice& slice, time_point now) {
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

}  // namespace

decode_receiver::decode_receiver(decode_receiver_options options)
    : session_shell{"receiver", std::move(options.basis)},
      request_{std::move(options.request)},
      deadline_{options.deadline},
      park_until_{options.park_until} {}

session_actions decode_receiver::start() {
  const auto& geometry = *basis_.geometry;
  auto request = std::move(request_);
  if (!geometry.moves_anything()) request.token_begin = request.token_end;
  basis_.tokens = {request.token_begin, request.token_end};
  // In read mode the prefill side writes nothing and needs no destination.
  name_blocks(basis_, request, request.mode == transfer_mode::write);
  receive_session::options machine;
  machine.layers = geometry.layers();
  machine.layers_per_batch = layers_per_batch(geometry, request.token_end - request.token_begin);
  machine.has_state = geometry.has_state();
  machine.deadline = deadline_;
  machine_.emplace(machine, std::move(request));
  return machine_->start();
}

planned_batch decode_receiver::plan(post_slice& post) {
  return plan_batch(*around_, basis_, post, transport::direction::read, {});
}

result<say> decode_receiver::prepare_message(send_message& order) {
  say what{std::move(order.message), {}};
  // The engine is told of its blocks first, which is one system call earlier.
  what.may_be_delayed = std::holds_alternative<transfer_release>(what.message);
  auto* request = std::get_if<transfer_request>(&what.message);
  if (request == nullptr) return what;
  // When sent again over the next link, the two times stay the same.
  const auto left_until = [now = around_->now()](time_point then) {
    return std::chrono::duration_cast<std::chrono::milliseconds>(then - now);
  };
  request->deadline_ms = whole_ms(left_until(deadline_));
  if (park_until_) {
    const auto left = left_until(*park_until_);
    request->park_ms = left.count() > 0 ? whole_ms(left) : 0;
  }
  if (request->mode != transfer_mode::write || request->token_begin >= request->token_end) {
    return what;
  }
  auto wishes = wish_grants(basis_, transport::access::write);
  if (!wishes) return fail(wishes.error());
  what.grants = std::move(*wishes);
  return what;
}

void decode_receiver::tell(tell_layers& layers) {
  // The engine counts all layers of its cache, a transfer only those that both sides hold.
  auto slice = layers.slice;
  slice.layer_begin += basis_.geometry->first_local_layer();
  slice.layer_end += basis_.geometry->first_local_layer();
  around_->tell_runner({session_layers{basis_.transfer, slice}});
}

session_actions decode_receiver::heard(session_message& message) {
  if (const auto* landed = std::get_if<layers_landed>(&message)) {
    auto actions = machine_->landed(*landed);
    if (machine_->current() != receive_session::state::finished)
      count_landed(basis_, landed->slice, around_->now());
    return actions;
  }
  if (const auto* sealed = std::get_if<transfer_sealed>(&message)) return machine_->sealed(*sealed);
  if (auto* offer = std::get_if<transfer_offer>(&message)) {
    if (machine_->expects_offer()) {
      auto adopted = adopt_offer(basis_, *offer);
      if (!adopted) return machine_->local_abort(adopted.error());
    }
    return machine_->offered(*offer);
  }
  return machine_->local_abort(out_of_place(basis_, "prefill", message));
}

session_actions decode_receiver::whole() {
  return machine_->received_whole();
}
session_actions decode_receiver::given_up(abort_session& abort) {
  return abort.refused ? machine_->refused_elsewhere(std::move(abort.why))
                       : machine_->local_abort(std::move(abort.why));
}

}  // namespace troupe::actors
