#include "troupe/actors/transfer/send_session.hpp"

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>

#include "troupe/actors/base/phrases.hpp"

namespace troupe::actors {

send_session::send_session(options opts) : options_{std::move(opts)} {
  options_.max_in_flight = std::max(options_.max_in_flight, 1u);
}

// -- events

bool send_session::goes_on() const noexcept {
  switch (state_) {
    case state::streaming:
    case state::draining: return true;
    case state::idle:
    case state::fencing:
    case state::finished: return false;
  }
  return false;
}

session_actions send_session::start(const transfer_request& request,
                                    std::span<const std::uint32_t> ready,
                                    std::optional<std::uint32_t> sealed_tokens,
                                    std::vector<std::byte> aux) {
  if (state_ != state::idle) return {};
  state_ = state::streaming;
  transfer_ = request.transfer;
  mode_ = request.mode;
  token_begin_ = request.token_begin;
  token_end_ = request.token_end;
  expect_ = request.expect;
  if (request.rank >= request.ranks) {
    return fence_with(
        {errc::out_of_range, "the request comes from rank " + std::to_string(request.rank) +
                                 " of " + std::to_string(request.ranks)},
        true);
  }
  if (token_begin_ > token_end_) {
    return fence_with(
        {errc::out_of_range, "the request begins at token " + std::to_string(token_begin_) +
                                 " and ends before it, at " + std::to_string(token_end_)},
        true);
  }
  if (ready.size() != options_.layers) {
    return fence_with(
        {errc::internal, "the source reports " + std::to_string(ready.size()) +
                             " layers, the cache has " + std::to_string(options_.layers)},
        true);
  }
  const bool empty = token_begin_ == token_end_;
  if (!empty) {
    ready_.assign(ready.begin(), ready.end());
    if (auto wrong = skip_landed(request)) return fence_with(*std::move(wrong), true);
  }
  if (sealed_tokens) {
    if (auto wrong = seal(*sealed_tokens, std::move(aux)))
      return fence_with(*std::move(wrong), true);
  }
  return advance();
}

session_actions send_session::source_ready(std::uint32_t layer_begin, std::uint32_t layer_end,
                                           std::uint32_t token_end) {
  switch (state_) {
    case state::streaming: break;
    case state::idle:
    case state::draining:
    case state::fencing:
    case state::finished: return {};
  }
  if (layer_begin > layer_end || layer_end > options_.layers) {
    return fence_with(
        {errc::out_of_range,
         "layers " + std::to_string(layer_begin) + " to " + std::to_string(layer_end) +
             " were said to be ready, the cache has " + std::to_string(options_.layers)},
        true);
  }
  if (token_begin_ == token_end_) return {};
  for (auto layer = layer_begin; layer < layer_end; ++layer) {
    ready_[layer] = std::max(ready_[layer], token_end);
  }
  return advance();
}

session_actions send_session::sealed(std::uint32_t tokens, std::vector<std::byte> aux) {
  switch (state_) {
    case state::streaming: break;
    case state::idle:
    case state::draining:
    case state::fencing:
    case state::finished: return {};
  }
  if (sealed_) return {};
  if (auto wrong = seal(tokens, std::move(aux))) return fence_with(*std::move(wrong), true);
  return advance();
}

session_actions send_session::batch_completed(transport::batch_id id,
                                              const std::optional<troupe::error>& failure) {
  if (!goes_on()) return {};
  const auto found = std::find(in_flight_.begin(), in_flight_.end(), id);
  if (found == in_flight_.end()) return {};
  in_flight_.erase(found);
  if (!failure) return state_ == state::streaming ? advance() : session_actions{};
  if (failure->code == errc::grant_revoked) {
    revoked_ = true;
    return {};
  }
  return fence_with(*failure, true);
}

session_actions send_session::peer_released() {
  switch (state_) {
    case state::streaming:
      return fence_with(
          {errc::internal, "the decode side released a transfer that was not sealed yet"}, true);
    case state::draining: state_ = state::fencing; return {conclude{}, fence_transfer{}};
    case state::idle:
    case state::fencing:
    case state::finished: return {};
  }
  return {};
}

session_actions send_session::peer_aborted(troupe::error why) {
  owes_quiescent_ = state_ != state::idle;
  return fence_with(std::move(why), false);
}

session_actions send_session::peer_refused(troupe::error why) {
  refused_ = true;
  return peer_aborted(std::move(why));
}

session_actions send_session::local_abort(troupe::error why) {
  return fence_with(std::move(why), true);
}

session_actions send_session::link_lost(troupe::error why) {
  peer_gone_ = true;
  return fence_with(std::move(why), false);
}

session_actions send_session::link_back() {
  if (!goes_on()) return {};
  held_ = true;
  revoked_ = false;
  in_flight_.clear();
  return {};
}

session_actions send_session::asked_again(const transfer_request& request) {
  if (!goes_on()) return {};
  if (!held_) return {};
  held_ = false;
  state_ = state::streaming;
  batches_before_ = batches_;
  if (request.mode != mode_ || request.token_begin != token_begin_ ||
      request.token_end != token_end_ || request.expect != expect_) {
    return fence_with({errc::out_of_range, "the repeated request differs from the first"}, true);
  }
  if (auto wrong = skip_landed(request)) return fence_with(*std::move(wrong), true);
  return advance();
}

session_actions send_session::quiescent() {
  switch (state_) {
    case state::fencing: break;
    case state::idle:
    case state::streaming:
    case state::draining:
    case state::finished: return {};
  }
  state_ = state::finished;
  session_actions out;
  if (owes_quiescent_ && !peer_gone_) out.emplace_back(send_message{transfer_quiescent{transfer_}});
  out.emplace_back(unpin{});
  return out;
}

session_actions send_session::expire(time_point now) {
  if (now < options_.deadline) return {};
  std::string sentence = "the deadline of the transfer passed ";
  switch (state_) {
    case state::idle: sentence += "before the decode side asked for it"; break;
    case state::streaming:
      sentence += sealed_ ? "before everything was posted" : "before the engine sealed the request";
      break;
    case state::draining: sentence += "before the decode side released it"; break;
    case state::fencing:
    case state::finished: return {};
  }
  return fence_with({errc::deadline, std::move(sentence)}, true);
}

// -- what events have in common

std::optional<error> send_session::seal(std::uint32_t tokens, std::vector<std::byte> aux) {
  if (token_end_ > tokens) {
    return error{errc::out_of_range, "the request wants " + std::to_string(token_end_) +
                                         " tokens, the prefill engine sealed it with " +
                                         std::to_string(tokens)};
  }
  if (aux.size() > max_aux) {
    return error{errc::out_of_range, "the engine sealed with " + std::to_string(aux.size()) +
                                         " bytes of its own, allowed are " +
                                         std::to_string(max_aux)};
  }
  if (auto wrong = check_expected(expect_, aux)) {
    refused_ = true;
    return wrong;
  }
  for (std::size_t layer = 0; layer < ready_.size(); ++layer) {
    if (ready_[layer] < tokens) {
      return error{errc::invalid_config, "the engine sealed " + std::to_string(tokens) +
                                             " tokens while layer " + std::to_string(layer) +
                                             " is ready up to token " +
                                             std::to_string(ready_[layer]) +
                                             "; report every layer ready before the seal"};
    }
  }
  sealed_ = true;
  aux_ = std::move(aux);
  return std::nullopt;
}

/// Sets the whole request to be posted, except what the decode side says has landed.
std::optional<error> send_session::skip_landed(const transfer_request& request) {
  if (token_begin_ == token_end_) return std::nullopt;
  posted_.assign(options_.layers, token_begin_);
  state_due_ = options_.has_state;
  if (!request.progress) return std::nullopt;
  const auto& here = request.progress->here;
  if (mode_ == transfer_mode::read && here.empty()) return std::nullopt;
  const bool within = std::all_of(here.begin(), here.end(), [this](std::uint32_t token) {
    return token >= token_begin_ && token <= token_end_;
  });
  if (here.size() != options_.layers || !within) {
    return error{errc::out_of_range,
                 "the repeated request reports progress on what it did not ask for"};
  }
  posted_ = here;
  state_due_ = options_.has_state && !request.progress->state;
  return std::nullopt;
}

/// Streaming: posts every range that can be posted, and drains when none is left.
session_actions send_session::advance() {
  session_actions out;
  if (revoked_ || held_) return out;
  const bool empty = token_begin_ == token_end_;
  if (mode_ == transfer_mode::read && !empty) {
    if (sealed_) {
      state_ = state::draining;
      out.emplace_back(
          send_offer{{0, options_.layers, token_begin_, token_end_}, state_due_, aux_});
    }
    return out;
  }
  auto range = next_range();
  while (range && in_flight_.size() < options_.max_in_flight) {
    auto next = post(*range);
    range = next_range();
    if (sealed_ && !range) next.state = std::exchange(state_due_, false);
    out.emplace_back(std::move(next));
  }
  if (range || !sealed_) return out;
  if (state_due_) {
    if (in_flight_.size() >= options_.max_in_flight) return out;
    auto last = post({0, 0, token_end_, token_end_});
    last.state = std::exchange(state_due_, false);
    out.emplace_back(std::move(last));
  }
  state_ = state::draining;
  if (out.empty()) {
    out.emplace_back(
        send_message{transfer_sealed{transfer_, token_end_, batches_ - batches_before_, aux_}});
  } else {
    // A seal with the last batch saves a frame, a system call and a wake-up of the peer.
    std::get<post_slice>(out.back()).seal = {token_end_, batches_ - batches_before_, aux_};
  }
  return out;
}

/// The first layers that have the same tokens ready and not posted, as many as fit into one batch.
std::optional<cache_slice> send_session::next_range() const {
  const auto end_of = [this](std::uint32_t layer) {
    const auto end = std::min(ready_[layer], token_end_);
    if (options_.tokens_at_once.empty()) return end;
    const auto unit = options_.tokens_at_once[layer];
    const auto missing = (unit - end % unit) % unit;  // tokens that the last unit lacks
    const bool complete = end == token_end_ && (sealed_ || ready_[layer] - end >= missing);
    return complete ? end : end - end % unit;
  };
  const auto layers = static_cast<std::uint32_t>(posted_.size());
  std::uint32_t first = 0;
  while (first < layers && end_of(first) <= posted_[first]) ++first;
  if (first == layers) return std::nullopt;
  const auto room = options_.layers_per_batch == 0 ? layers : options_.layers_per_batch;
  auto last = first + 1;
  while (last < layers && last - first < room && posted_[last] == posted_[first] &&
         end_of(last) == end_of(first)) {
    ++last;
  }
  return cache_slice{first, last, posted_[first], end_of(first)};
}

post_slice send_session::post(cache_slice slice) {
  for (auto layer = slice.layer_begin; layer < slice.layer_end; ++layer) {
    posted_[layer] = slice.token_end;
  }
  const transport::batch_id id{++batches_};
  in_flight_.push_back(id);
  return {id, slice, false, std::nullopt};
}

/// The only way into a failure. Does nothing if the outcome is already known.
session_actions send_session::fence_with(error why, bool tell) {
  session_actions out;
  switch (state_) {
    case state::idle:
      // Nothing was granted or posted: there is nothing to fence.
      state_ = state::finished;
      out.emplace_back(conclude{std::move(why), {}, refused_});
      out.emplace_back(unpin{});
      return out;
    case state::streaming:
    case state::draining:
      state_ = state::fencing;
      if (tell && !peer_gone_) {
        out.emplace_back(
            send_message{refused_ ? make_refusal(transfer_, why) : make_abort(transfer_, why)});
      }
      out.emplace_back(conclude{std::move(why), {}, refused_});
      out.emplace_back(fence_transfer{});
      return out;
    case state::fencing:
    case state::finished: return out;
  }
  return out;
}

std::string_view to_string(send_session::state s) noexcept {
  switch (s) {
    case send_session::state::idle: return "idle";
    case send_session::state::streaming: return "streaming";
    case send_session::state::draining: return "draining";
    case send_session::state::fencing: return "fencing";
    case send_session::state::finished: return "finished";
  }
  return "unknown";
}

std::optional<error> check_expected(std::span<const std::byte> expected,
                                    std::span<const std::byte> aux) {
  const auto begin = aux.first(std::min(expected.size(), aux.size()));
  if (std::ranges::equal(expected, begin)) return std::nullopt;
  return error{errc::layout_mismatch,
               "the decode engine expects the prefill engine's own bytes to begin with 0x" +
                   hex_text(expected) + ", they " +
                   (aux.empty() ? "are none" : "begin with 0x" + hex_text(begin)) +
                   "; another request has the same id"};
}

}  // namespace troupe::actors
