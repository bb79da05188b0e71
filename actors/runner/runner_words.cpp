#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "troupe/actors/context/engine_checks.hpp"
#include "troupe/actors/runner/operation_runner.hpp"
#include "troupe/actors/runner/source_word.hpp"

namespace troupe::actors::operations {

// -- our own, decode side

void operation_runner::conclude_words(operation_id operation, std::optional<troupe::error> failure,
                                      const session_event& to_sessions) {
  const auto found = words_.find(operation);
  if (found == words_.end()) return;
  const auto words = std::move(found->second);
  words_.erase(found);
  forget_deadline(words.deadline, timer::operation, operation.value);
  if (words.verb == source_verb::hold) hold_of_.erase(words.request);
  for (const auto& to : words.sources) {
    if (!to.transfer) {
      leave_link_line(to.peer, operation);
    } else if (!to.ended) {
      tell_session(*to.transfer, to_sessions);
    }
  }
  if (failure) {
    tell_last_outcome(operation, event_failed{std::move(*failure)});
  } else {
    tell_last_outcome(operation, event_done{});
  }
}

/// A source has answered, or will not.
void operation_runner::has_ended(operation_id operation, words_to_sources::to_source& at,
                                 std::optional<troupe::error> failure) {
  auto& words = words_.at(operation);
  at.ended = true;
  if (words.verb == source_verb::hold) {
    // If one source cannot serve, the request as a whole cannot be received.
    const troupe::error others{errc::aborted, "the source at " + at.peer + " has ended"};
    conclude_words(operation, std::move(failure), session_event{abort_session{others}});
    return;
  }
  if (failure && !words.failure) words.failure = std::move(failure);
  if (std::ranges::all_of(words.sources, &words_to_sources::to_source::ended)) {
    conclude_words(operation, std::move(words.failure), session_event{receive_is_whole{}});
  }
}

/// The source at that node, if it waits for its link. Each node is named once.
words_to_sources::to_source* operation_runner::waiting_source(operation_id operation,
                                                              const std::string& peer) {
  const auto words = words_.find(operation);
  if (words == words_.end()) return nullptr;
  auto& sources = words->second.sources;
  const auto at = std::ranges::find(sources, peer, &words_to_sources::to_source::peer);
  const bool waits = at != sources.end() && !at->transfer && !at->ended;
  return waits ? &*at : nullptr;
}

void operation_runner::say_word(operation_id operation, words_to_sources::to_source& to,
                                const link_handle& link) {
  auto& words = words_.at(operation);
  to.transfer = new_transfer();
  auto word = around_.begin_session(*to.transfer, link,
                                    std::make_unique<source_word>(source_word_options{
                                        link, *to.transfer, words.verb, words.request, to.life}));
  const auto* side = words.verb == source_verb::hold ? "hold" : "release";
  session_begins(operation, *to.transfer, std::move(word), link,
                 report_of(words.request, link, side, "asked"), no_deadline);
}

void operation_runner::start_word_to(operation_id operation, const link_handle& link) {
  auto* to = waiting_source(operation, link.peer);
  if (to == nullptr) return;
  if (auto meant = check_life(link.peer, link.peer_incarnation.value, to->life); meant) {
    say_word(operation, *to, link);
  } else {
    has_ended(operation, *to, meant.error());
  }
}

void operation_runner::word_cannot_come(operation_id operation, const std::string& peer,
                                        const troupe::error& why) {
  // The others are still told.
  if (auto* to = waiting_source(operation, peer); to != nullptr) has_ended(operation, *to, why);
}

void operation_runner::on_start_word(start_word& order) {
  const auto operation = order.operation;
  auto& words = words_[operation];
  words.verb = order.verb;
  words.request = std::move(order.request);
  // A hold lasts until it is ended explicitly.
  words.deadline =
      words.verb == source_verb::hold ? no_deadline : deadline_after(std::chrono::milliseconds{});
  if (words.verb == source_verb::hold) {
    hold_of_[words.request] = operation;
  } else {
    deadlines_.emplace(words.deadline, timer::operation, operation.value);
  }
  for (std::size_t i = 0; i < order.sources.size(); ++i) {
    words.sources.push_back(
        {order.sources[i], order.lives.empty() ? 0 : order.lives[i], std::nullopt, false});
  }
  if (stopping_) {
    conclude_words(operation, troupe::error{errc::aborted, "the node stops"}, {});
    return;
  }
  for (const auto& peer : order.sources) {
    if (const auto link = links_.find(peer); link != links_.end()) {
      start_word_to(operation, link->second);
    } else if (words_.contains(operation)) {
      wait_for_link(peer, operation);
    }
  }
}

void operation_runner::word_concluded(operation_id operation, session_concluded& outcome) {
  auto& sources = words_.at(operation).sources;
  const auto at = std::ranges::find(sources, std::optional{outcome.transfer},
                                    &words_to_sources::to_source::transfer);
  if (at != sources.end()) has_ended(operation, *at, std::move(outcome.failure));
}

void operation_runner::end_own_hold(const std::string& request) {
  const auto& holds = hold_of_;
  const auto found = holds.find(request);
  if (found != holds.end()) {
    conclude_words(found->second, std::nullopt, session_event{receive_is_whole{}});
  }
}

// -- of peers, prefill side

/// Whether the peer may ask about our sources at all.
result<void> operation_runner::check_word(const link_handle& link, std::uint64_t life) const {
  if (stopping_) return fail(errc::aborted, "the node stops");
  const auto& ours = context_->self;
  if (auto meant = check_life(ours.name, ours.incarnation, life); !meant) return meant;
  const auto stage = stage_of_peer(*context_, link.peer);
  if (!stage) return fail(stage.error());
  if (stage->empty()) return {};
  return check_any_edge(context_->settings, context_->self.stage, *stage);
}

/// Another node that takes the source, or is to take it: the source goes on for that node.
std::optional<std::string> operation_runner::other_taker(const source& src,
                                                         const std::string& peer) const {
  for (const auto sender : src.senders()) {
    const auto session = sessions_.find(sender);
    if (session != sessions_.end() && session->second.report.peer != peer)
      return session->second.report.peer;
  }
  for (const auto holder : src.holders) {
    const auto& its = holds_.at(holder).link.peer;
    if (its != peer) return its;
  }
  const auto& for_whom = src.spec().held_for;
  const bool is_meant = for_whom.empty() || std::ranges::find(for_whom, peer) != for_whom.end();
  return is_meant ? std::nullopt : std::optional{for_whom.front()};
}

/// Another node that waits for the request to be sent.
std::optional<std::string> operation_runner::other_asker(const std::string& request,
                                                         const std::string& peer) const {
  const auto found = parked_.find(request);
  if (found == parked_.end()) return std::nullopt;
  const auto other = std::ranges::find_if(
      found->second, [&](const parked_request& one) { return one.link.peer != peer; });
  return other == found->second.end() ? std::nullopt : std::optional{other->link.peer};
}

void operation_runner::forget_came(const link_handle& link, const transfer_forget& word) {
  if (auto may = check_word(link, word.life); !may) {
    refuse_request(link, word.transfer, may.error());
    return;
  }
  const auto of = source_of_.find(word.request);
  const bool is_sent = of != source_of_.end();
  if (const auto other = is_sent ? other_taker(sources_.at(of->second), link.peer)
                                 : other_asker(word.request, link.peer)) {
    refuse_request(link, word.transfer,
                   {errc::already_exists, "request `" + word.request + "` goes on for " + *other +
                                              "; only that node gives it back"});
    return;
  }
  const troupe::error why{errc::aborted,
                          link.peer + " gave request `" + word.request + "` back: nobody wants it"};
  if (is_sent) {
    conclude_source(of->second, why, session_event{abort_session{why}});
  } else if (ended_.find(word.request) == nullptr) {
    given_back_.remember(word.request, {ended_requests::how::failed, why});
    drop_parked_for(word.request, [&](const parked_request& one) {
      refuse_request(one.link, one.request.transfer, why);
      return true;
    });
  }
  say_over(link, transfer_release{word.transfer});
}

void operation_runner::hold_came(const link_handle& link, const transfer_hold& word) {
  if (auto may = check_word(link, word.life); !may) {
    refuse_request(link, word.transfer, may.error());
    return;
  }
  if (const auto known = holds_.find(word.transfer); known != holds_.end()) {
    if (known->second.link.id == link.id) {
      known->second.link = link;  // sent again over the rebuilt link
    } else {
      refuse_request(link, word.transfer, {errc::already_exists, "that hold is another node's"});
    }
    return;
  }
  if (sessions_.contains(word.transfer)) {
    refuse_request(link, word.transfer, {errc::already_exists, "that id is a live transfer's"});
    return;
  }
  const auto of = source_of_.find(word.request);
  if (of == source_of_.end()) {
    const auto* end = ended_.find(word.request);
    if (end != nullptr && end->came == ended_requests::how::delivered) {
      say_over(link, transfer_release{word.transfer});
    } else {
      refuse_request(link, word.transfer,
                     end != nullptr
                         ? end->told
                         : troupe::error{errc::not_found, "request `" + word.request +
                                                              "` is not offered here: there is "
                                                              "nothing to hold"});
    }
    return;
  }
  auto& src = sources_.at(of->second);
  const auto former = std::ranges::find_if(
      src.holders, [&](const transfer_id one) { return holds_.at(one).link.peer == link.peer; });
  if (former != src.holders.end()) {
    const auto replaced = *former;
    refuse_request(holds_.at(replaced).link, replaced,
                   {errc::aborted, "another hold of this node has replaced this one"});
    end_hold(replaced);
  }
  if (holds_.size() >= context_->settings.max_operations) {
    refuse_request(
        link, word.transfer,
        {errc::overloaded, std::to_string(holds_.size()) + " sources are held here, which is "
                                                           "limits.max_operations: hold fewer"});
    return;
  }
  holds_.emplace(word.transfer, source_hold{of->second, link, around_.now()});
  src.holders.insert(word.transfer);
  leases_.keep(of->second, word.transfer, link.peer, link.peer_incarnation, around_.now());
  lengthen_if_filled(of->second, src);
  watch_leases();
}

void operation_runner::tell_holders(source& src, const std::optional<troupe::error>& failure) {
  for (const auto transfer : src.holders) {
    const auto found = holds_.find(transfer);
    if (failure) {
      refuse_request(found->second.link, transfer, *failure);
    } else {
      say_over(found->second.link, transfer_release{transfer});
    }
    holds_.erase(found);
  }
  src.holders.clear();
}

void operation_runner::end_hold(transfer_id transfer) {
  const auto found = holds_.find(transfer);
  if (found == holds_.end()) return;
  const auto of = found->second.source;
  auto& src = sources_.at(of);
  src.holders.erase(transfer);
  leases_.leave(of, transfer, around_.now());
  holds_.erase(found);
  place_reopened(of, src);
}

void operation_runner::end_holds_over(std::uint64_t link) {
  std::vector<transfer_id> over;
  for (const auto& [transfer, hold] : holds_) {
    if (hold.link.id == link) over.push_back(transfer);
  }
  for (const auto transfer : over) end_hold(transfer);
}

}  // namespace troupe::actors::operations
