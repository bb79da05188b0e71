#include "troupe/actors/transfer/receive_session.hpp"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

namespace troupe::actors {
namespace {

/// Pieces that a peer may land ahead of a gap before it is refused: many times what the batches of
/// an honest peer can make, and a bound on the memory that a dishonest peer can take.
constexpr std::size_t max_ahead = 65'536;

std::string describe(const cache_slice& slice) {
  return "layers " + std::to_string(slice.layer_begin) + " to " + std::to_string(slice.layer_end) +
         ", tokens " + std::to_string(slice.token_begin) + " to " + std::to_string(slice.token_end);
}

}  // namespace

receive_session::receive_session(options opts, transfer_request request)
    : options_{opts}, request_{std::move(request)} {
  options_.max_in_flight = std::max(options_.max_in_flight, 1u);
}

// -- events

bool receive_session::goes_on() const noexcept {
  switch (state_) {
    case state::requested:
    case state::receiving: return true;
    case state::idle:
    case state::fencing:
    case state::arrived:
    case state::finished: return false;
  }
  return false;
}

session_actions receive_session::start() {
  if (state_ != state::idle) return {};
  if (request_.token_begin > request_.token_end) {
    return fence_with({errc::out_of_range, "the prefix of " + std::to_string(request_.token_begin) +
                                               " tokens is longer than the request of " +
                                               std::to_string(request_.token_end)},
                      false);
  }
  state_ = state::requested;
  if (!empty() && request_.mode == transfer_mode::write) {
    here_.assign(options_.layers, request_.token_begin);
  }
  session_actions out;
  out.emplace_back(send_message{request_});
  return out;
}

session_actions receive_session::landed(const layers_landed& message) {
  auto out = batch_landed(message);
  if (!message.seal) return out;
  const auto& seal = *message.seal;
  auto more = sealed({message.transfer, seal.token_end, seal.batches, seal.aux});
  std::move(more.begin(), more.end(), std::back_inserter(out));
  return out;
}

session_actions receive_session::batch_landed(const layers_landed& message) {
  if (!goes_on()) return {};
  if (auto wrong = check(message.slice, message.state)) return fence_with(*std::move(wrong), true);
  state_ = state::receiving;
  ++landed_batches_;
  if (sealed_batches_ && landed_batches_ > *sealed_batches_) {
    return nonsense("more batches than the " + std::to_string(*sealed_batches_) +
                    " it sealed with");
  }
  state_here_ = state_here_ || message.state;
  session_actions out;
  cache_slice news{};
  const auto tell = [&out, &news] {
    if (news.layer_end > news.layer_begin) out.emplace_back(tell_layers{news});
  };
  for (auto layer = message.slice.layer_begin; layer < message.slice.layer_end; ++layer) {
    const auto before = here_[layer];
    if (auto wrong = take(layer, message.slice)) return fence_with(*std::move(wrong), true);
    const auto after = here_[layer];
    if (after == before) continue;
    if (news.layer_end == layer && news.token_begin == before && news.token_end == after) {
      ++news.layer_end;
    } else {
      tell();
      news = {layer, layer + 1, before, after};
    }
  }
  tell();
  return complete_if_all_landed(std::move(out));
}

session_actions receive_session::sealed(const transfer_sealed& message) {
  if (!goes_on()) return {};
  if (request_.mode == transfer_mode::read && !empty()) {
    return nonsense("a seal in a transfer that is read, where an offer belongs");
  }
  if (sealed_batches_) return nonsense("a second seal");
  if (message.token_end != request_.token_end) {
    return nonsense("a seal at token " + std::to_string(message.token_end) + " of a request for " +
                    std::to_string(request_.token_end));
  }
  if (message.batches < landed_batches_ || (empty() && message.batches > 0)) {
    return nonsense("a seal of " + std::to_string(message.batches) + " batches where " +
                    std::to_string(landed_batches_) + " have landed");
  }
  state_ = state::receiving;
  sealed_batches_ = message.batches;
  aux_ = message.aux;
  return complete_if_all_landed({});
}

session_actions receive_session::offered(const transfer_offer& message) {
  switch (state_) {
    case state::requested: break;
    case state::receiving: return nonsense("an offer in the middle of the transfer");
    case state::idle:
    case state::fencing:
    case state::arrived:
    case state::finished: return {};
  }
  if (request_.mode == transfer_mode::write && !empty()) {
    return nonsense("an offer to read in a transfer that is written");
  }
  if (message.token_end < request_.token_end) {
    return nonsense("an offer of " + std::to_string(message.token_end) +
                    " tokens for a request of " + std::to_string(request_.token_end));
  }
  state_ = state::receiving;
  aux_ = message.aux;
  if (empty()) return succeed({});
  return pull_more();
}

session_actions receive_session::batch_completed(transport::batch_id id,
                                                 const std::optional<troupe::error>& failure) {
  switch (state_) {
    case state::receiving: break;
    case state::idle:
    case state::requested:
    case state::fencing:
    case state::arrived:
    case state::finished: return {};
  }
  const auto found = std::find_if(in_flight_.begin(), in_flight_.end(),
                                  [id](const pull& p) { return p.id == id; });
  if (found == in_flight_.end()) return {};
  const auto pulled = *found;
  const auto& slice = pulled.slice;
  in_flight_.erase(found);
  if (failure) {
    if (failure->code != errc::grant_revoked) return fence_with(*failure, true);
    // The peer's abort is on its way; or its end of the link broke first, and this slice will be
    // pulled again over the next link.
    revoked_ = true;
    again_.push_back(pulled);
    return {};
  }
  session_actions out;
  if (slice.layer_end > slice.layer_begin) out.emplace_back(tell_layers{slice});
  if (revoked_) return out;
  auto more = pull_more();
  std::move(more.begin(), more.end(), std::back_inserter(out));
  if (in_flight_.empty()) return succeed(std::move(out));
  return out;
}

session_actions receive_session::peer_aborted(troupe::error why) {
  if (state_ == state::arrived) {
    // The fate of the source does not affect the bytes that are here. If the peer repeats the abort
    // over the next link, the last word that this side repeats there answers it.
    if (std::exchange(peer_gone_, true)) return {};
    return {send_message{transfer_quiescent{id()}}};
  }
  owes_quiescent_ = state_ != state::idle;
  if (state_ == state::fencing) return overturn(std::move(why), false);
  return fence_with(std::move(why), false);
}

session_actions receive_session::peer_refused(troupe::error why) {
  refused_ = true;
  return peer_aborted(std::move(why));
}

session_actions receive_session::local_abort(troupe::error why) {
  if (state_ == state::fencing) return overturn(std::move(why), true);
  if (state_ == state::arrived) return finish_with(abort_for(why));
  return fence_with(std::move(why), true);
}

session_actions receive_session::refused_elsewhere(troupe::error why) {
  refused_ = true;
  return local_abort(std::move(why));
}

session_actions receive_session::link_lost(troupe::error why) {
  peer_gone_ = true;
  return fence_with(std::move(why), false);
}

session_actions receive_session::link_back() {
  if (!goes_on()) return {};
  state_ = state::requested;
  // The peer posts pieces behind a gap again, together with the gap.
  ahead_.clear();
  landed_batches_ = 0;
  sealed_batches_.reset();
  again_.insert(again_.end(), in_flight_.begin(), in_flight_.end());
  in_flight_.clear();
  revoked_ = false;
  auto request = request_;
  request.progress = transfer_progress{here_, state_here_};
  session_actions out;
  out.emplace_back(send_message{std::move(request)});
  return out;
}

session_actions receive_session::quiescent() {
  switch (state_) {
    case state::fencing: break;
    case state::idle:
    case state::requested:
    case state::receiving:
    case state::arrived:
    case state::finished: return {};
  }
  session_actions out;
  if (!std::exchange(told_, true)) {
    state_ = state::arrived;
    out.emplace_back(conclude{std::nullopt, std::move(aux_)});
    return out;
  }
  state_ = state::finished;
  if (owes_quiescent_ && !peer_gone_) out.emplace_back(send_message{transfer_quiescent{id()}});
  out.emplace_back(unpin{});
  return out;
}

session_actions receive_session::received_whole() {
  if (state_ != state::arrived) return {};
  return finish_with(transfer_release{id()});
}

session_actions receive_session::expire(time_point now) {
  if (now < options_.deadline) return {};
  std::string sentence = "the deadline of the transfer passed ";
  switch (state_) {
    case state::idle: sentence += "before it was asked for"; break;
    case state::requested: sentence += "before the prefill side sent anything"; break;
    case state::receiving: sentence += "before everything had arrived"; break;
    case state::fencing:
      return overturn({errc::deadline, sentence + "before the link was fenced"}, true);
    case state::arrived:  // the receive's own deadline ends it
    case state::finished: return {};
  }
  return fence_with({errc::deadline, std::move(sentence)}, true);
}

// -- what events have in common

bool receive_session::empty() const noexcept {
  return request_.token_begin == request_.token_end;
}

/// Checks the slice of a batch that the peer reports, by itself.
std::optional<error> receive_session::check(const cache_slice& slice, bool with_state) const {
  const auto wrong = [](const std::string& what) {
    return error{errc::out_of_range, "the prefill side said that " + what};
  };
  if (request_.mode == transfer_mode::read)
    return wrong("layers landed in a transfer that is read");
  if (with_state && !options_.has_state)
    return wrong("state landed, which this cache does not have");
  if (with_state && (state_here_ || empty())) return wrong("state landed that was not due");
  const bool no_layers = slice.layer_begin == slice.layer_end;
  const bool no_tokens = slice.token_begin == slice.token_end;
  if (no_layers && no_tokens && with_state) return std::nullopt;
  if (slice.layer_begin >= slice.layer_end || slice.layer_end > options_.layers ||
      slice.token_begin >= slice.token_end || slice.token_begin < request_.token_begin ||
      slice.token_end > request_.token_end) {
    return wrong(describe(slice) + " landed; the request is for " +
                 describe({0, options_.layers, request_.token_begin, request_.token_end}));
  }
  return std::nullopt;
}

/// Marks a slice's tokens as landed in one layer.
std::optional<error> receive_session::take(std::uint32_t layer, const cache_slice& slice) {
  auto& front = here_[layer];
  const auto next = ahead_.lower_bound({layer, slice.token_begin});
  const bool meets_next =
      next != ahead_.end() && next->first.first == layer && next->first.second < slice.token_end;
  bool meets_previous = slice.token_begin < front;
  if (next != ahead_.begin()) {
    const auto previous = std::prev(next);
    meets_previous =
        meets_previous || (previous->first.first == layer && previous->second > slice.token_begin);
  }
  if (meets_next || meets_previous) {
    return error{errc::out_of_range, "the prefill side said that layer " + std::to_string(layer) +
                                         " landed twice at tokens " +
                                         std::to_string(slice.token_begin) + " to " +
                                         std::to_string(slice.token_end)};
  }
  if (slice.token_begin > front) {
    if (ahead_.size() >= max_ahead) {
      return error{errc::overloaded, "the prefill side left more than " +
                                         std::to_string(max_ahead) + " gaps in what it landed"};
    }
    ahead_.emplace(std::pair{layer, slice.token_begin}, slice.token_end);
    return std::nullopt;
  }
  front = slice.token_end;
  for (auto it = ahead_.find({layer, front}); it != ahead_.end();
       it = ahead_.find({layer, front})) {
    front = it->second;
    ahead_.erase(it);
  }
  return std::nullopt;
}

/// Read mode: pulls the next groups of layers, the state tensors with the last.
session_actions receive_session::pull_more() {
  session_actions out;
  const auto room = options_.layers_per_batch == 0 ? options_.layers : options_.layers_per_batch;
  const auto post = [&](const cache_slice& slice, bool with_state) {
    const transport::batch_id id{++pulls_};
    in_flight_.push_back({id, slice, with_state});
    out.emplace_back(post_slice{id, slice, with_state, std::nullopt});
  };
  while (in_flight_.size() < options_.max_in_flight && !again_.empty()) {
    const auto lost = again_.back();
    again_.pop_back();
    post(lost.slice, lost.state);
  }
  while (in_flight_.size() < options_.max_in_flight) {
    const bool layers_left = next_layer_ < options_.layers;
    const bool state_left = options_.has_state && !state_pulled_;
    if (!layers_left && !state_left) break;
    cache_slice slice{0, 0, request_.token_end, request_.token_end};
    if (layers_left) {
      const auto end = next_layer_ + std::min(room, options_.layers - next_layer_);
      slice = {next_layer_, end, request_.token_begin, request_.token_end};
      next_layer_ = end;
    }
    const bool with_state = state_left && next_layer_ == options_.layers;
    state_pulled_ = state_pulled_ || with_state;
    post(slice, with_state);
  }
  return out;
}

session_actions receive_session::complete_if_all_landed(session_actions before) {
  if (!sealed_batches_ || landed_batches_ < *sealed_batches_) return before;
  for (std::size_t layer = 0; layer < here_.size(); ++layer) {
    if (here_[layer] < request_.token_end) {
      return nonsense("all its batches landed while layer " + std::to_string(layer) +
                      " misses what follows token " + std::to_string(here_[layer]));
    }
  }
  if (options_.has_state && !empty() && !state_here_) {
    return nonsense("all its batches landed without the state tensors");
  }
  return succeed(std::move(before));
}

session_actions receive_session::succeed(session_actions before) {
  state_ = state::fencing;
  before.emplace_back(fence_transfer{});
  return before;
}

session_actions receive_session::finish_with(session_message last_word) {
  state_ = state::finished;
  session_actions out;
  if (!peer_gone_) out.emplace_back(send_message{std::move(last_word)});
  out.emplace_back(unpin{});
  return out;
}

transfer_abort receive_session::abort_for(const error& why) const {
  return refused_ ? make_refusal(id(), why) : make_abort(id(), why);
}

/// The only way into a failure. Does nothing if the transfer is being fenced already.
session_actions receive_session::fence_with(error why, bool tell) {
  session_actions out;
  bool known_to_peer = true;
  switch (state_) {
    case state::idle: known_to_peer = false; break;
    case state::requested:
    case state::receiving: break;
    case state::fencing:
    case state::arrived:
    case state::finished: return out;
  }
  state_ = state::fencing;
  told_ = true;
  if (tell && known_to_peer && !peer_gone_) out.emplace_back(send_message{abort_for(why)});
  out.emplace_back(conclude{std::move(why), {}, refused_});
  out.emplace_back(fence_transfer{});
  return out;
}

session_actions receive_session::nonsense(std::string what) {
  return fence_with({errc::out_of_range, "the prefill side sent " + std::move(what)}, true);
}

/// Fencing: a success that was not told yet becomes a failure.
session_actions receive_session::overturn(error why, bool tell) {
  session_actions out;
  if (std::exchange(told_, true)) return out;
  if (tell && !peer_gone_) out.emplace_back(send_message{abort_for(why)});
  out.emplace_back(conclude{std::move(why), {}, refused_});
  return out;
}

std::string_view to_string(receive_session::state s) noexcept {
  switch (s) {
    case receive_session::state::idle: return "idle";
    case receive_session::state::requested: return "requested";
    case receive_session::state::receiving: return "receiving";
    case receive_session::state::fencing: return "fencing";
    case receive_session::state::arrived: return "arrived";
    case receive_session::state::finished: return "finished";
  }
  return "unknown";
}

}  // namespace troupe::actors
