#include <algorithm>
#include <iterator>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <spdlog/spdlog.h>

#include "troupe/actors/base/phrases.hpp"
#include "troupe/actors/context/engine_checks.hpp"
#include "troupe/actors/context/prefill_sender.hpp"
#include "troupe/actors/logging.hpp"
#include "troupe/actors/membership/placement_epochs.hpp"
#include "troupe/actors/messages/member_list.hpp"
#include "troupe/actors/operations/request_tables.hpp"
#include "troupe/actors/runner/operation_runner.hpp"
#include "troupe/actors/transfer/send_session.hpp"
#include "troupe/kvcache/block_list.hpp"

namespace troupe::actors::operations {

namespace {

constexpr std::size_t max_parked_bytes = std::size_t{256} << 20;

/// Extra time at the deadline for the decode rank to say how its receive ended (released or given
/// up). If that message crossed ours, the transfer would be done there and failed here.
constexpr std::chrono::seconds patience_for_its_word{1};

/// The highest token that a source that grows may reach: its blocks are of one pool; with groups,
/// only a window of what it has computed is in them. A peer lists the blocks that it wants one by
/// one.
std::uint64_t growing_room(const kvcache::cache_layout& layout) noexcept {
  constexpr std::uint64_t longest_prompt = std::uint64_t{1} << 24;
  if (!layout.groups.empty()) return longest_prompt;
  return std::uint64_t{layout.blocks} * layout.block_tokens;
}

/// Whether the source holds, of each group of layers, all that the decode side keeps.
result<void> check_held(const transfer_request& request, const kvcache::cache_layout& layout,
                        std::span<const request_table> tables) {
  for (std::uint32_t i = 0; i < request.groups.size(); ++i) {
    const auto held = tables[i].first * kvcache::block_tokens_of(layout, i);
    const std::uint64_t wanted = std::max(request.token_begin, request.groups[i].token_begin);
    if (wanted >= held || wanted >= request.token_end) continue;
    return fail(errc::out_of_range, "the decode side keeps group " + std::to_string(i) +
                                        " of layers from token " + std::to_string(wanted) +
                                        " on, the prefill engine holds it from token " +
                                        std::to_string(held) + " on");
  }
  return {};
}

/// Peers choose the ids of their requests, and may choose the same.
troupe::error id_is_taken() {
  return {errc::already_exists, "another transfer with that id is live here; ask again"};
}

/// Up to which token each layer is ready that the decode rank holds as well.
std::vector<std::uint32_t> ready_of(const source& src, const kvcache::transfer_geometry& geometry) {
  const auto shared =
      std::span{src.ready()}.subspan(geometry.first_local_layer(), geometry.layers());
  return {shared.begin(), shared.end()};
}

}  // namespace

void operation_runner::release_source(operation_id operation) {
  const auto found = sources_.find(operation);
  if (found == sources_.end() || !found->second.concluded || !found->second.senders().empty())
    return;
  const auto& spec = found->second.spec();
  if (context_->pool) unpin_blocks(spec.request, spec.blocks);
  sources_.erase(found);
  context_->events.push_last({operation, event_unpinned{}});
}

std::string operation_runner::replica_of(const std::string& node) const {
  const member* m = find_member(*members_, node);
  if (m == nullptr) return "";
  // A restarted supervisor gives other numbers to the replicas that joined.
  const auto& joined = m->node.replica_name;
  return m->node.stage + "/" + (joined.empty() ? std::to_string(m->node.replica) : joined);
}

void operation_runner::learn_replicas(source& src) const {
  src.learn_replicas([this](const std::string& node) { return replica_of(node); });
}

void operation_runner::lengthen_if_filled(operation_id operation, source& src) {
  if (!src.lost() || src.has_open_place(leases_.waiting(operation))) return;
  forget_deadline(src.deadline(), timer::operation, operation.value);
  src.lengthen();
  deadlines_.emplace(src.deadline(), timer::operation, operation.value);
}

void operation_runner::place_ranks() {
  std::vector<operation_id> delivered;
  for (auto& [operation, src] : sources_) {
    if (src.concluded) continue;
    learn_replicas(src);
    lengthen_if_filled(operation, src);
    if (src.is_delivered()) delivered.push_back(operation);
  }
  for (const auto operation : delivered)
    conclude_source(operation, std::nullopt, {deadline_reached{}});
}

void operation_runner::conclude_source(operation_id operation, std::optional<troupe::error> failure,
                                       const session_event& to_senders) {
  auto& src = sources_.at(operation);
  if (src.concluded) return;
  src.concluded = true;
  compute_.erase(operation);
  leases_.end(operation);
  const auto& request = src.spec().request;
  forget_deadline(src.deadline(), timer::operation, operation.value);
  if (const auto of = source_of_.find(request); of != source_of_.end() && of->second == operation) {
    source_of_.erase(of);
  }
  using ended_how = ended_requests::how;
  if (failure) {
    ended_.remember(request, {ended_how::failed, *failure});
  } else {
    ended_.remember(request,
                    {ended_how::delivered,
                     {errc::not_found, "request `" + request + "` was delivered already"}});
  }
  tell_holders(src, failure);
  count_outcome(failure, src.bytes());
  if (failure) {
    tell_outcome(operation, event_failed{*failure});
    for (const auto sender : src.senders()) tell_session(sender, to_senders);
  } else {
    tell_outcome(operation, event_done{{}, src.bytes(), src.moved.told(src.began, around_.now())});
  }
  release_source(operation);
}

/// `deadline` is the decode rank's, counted from when it asked.
void operation_runner::start_sender(operation_id operation, const link_handle& link,
                                    transfer_request request, time_point deadline) {
  auto& src = sources_.at(operation);
  const auto transfer = request.transfer;
  if (const auto live = sessions_.find(transfer); live != sessions_.end()) {
    if (live->second.link.id == link.id) {
      pass_on(transfer, link, std::move(request));
    } else {
      refuse_request(link, transfer, id_is_taken());
    }
    return;
  }
  if (holds_.contains(transfer)) {
    refuse_request(link, transfer, id_is_taken());
    return;
  }
  auto mapping = geometry(link, kvcache::data_flow::to_remote);
  if (!mapping) {
    refuse_request(link, transfer, mapping.error());
    return;
  }
  const auto& settings = context_->settings;
  if (auto its = check_rank_of(settings, request, link.peer, *link.peer_layout); !its) {
    refuse_request(link, transfer, its.error());
    return;
  }
  const auto stage = stage_of_peer(*context_, link.peer);
  auto edge = stage ? result<void>{} : fail(stage.error());
  if (stage && !stage->empty()) {
    edge = check_edge(settings, context_->self.stage, *stage, request.mode);
  }
  if (!edge) {
    refuse_request(link, transfer, edge.error());
    return;
  }
  if (auto served = room_to_serve(); !served) {
    refuse_request(link, transfer, served.error());
    return;
  }
  if (!(*mapping)->moves_anything()) request.token_begin = request.token_end;
  const auto& layout = *context_->layout;
  auto tables = tables_of(layout, src.spec().blocks, src.spec().groups);
  auto kept = kept_of(request.groups);
  if (auto holds = check_held(request, layout, tables); !holds) {
    refuse_alone(link, transfer, holds.error());
    return;
  }
  // A send that grows does not have all its blocks yet; its seal checks the rest.
  const auto room = src.spec().grows ? growing_room(layout) : room_of(layout, tables);
  if (request.token_begin < request.token_end && request.token_end > room) {
    const troupe::error why{errc::out_of_range,
                            "the request wants " + std::to_string(request.token_end) +
                                " tokens, the blocks of the prefill engine hold " +
                                std::to_string(room)};
    refuse_request(link, transfer, why);
    if (settings.retry_window.count() == 0) {
      conclude_source(operation, why, session_event{abort_session{why}});
    }
    return;
  }
  if (src.sealed_tokens()) {
    // A wrong id concerns only its decode rank: the source goes on for the others.
    if (auto unmet = check_expected(request.expect, src.aux())) {
      refuse_alone(link, transfer, *unmet);
      return;
    }
  }
  prefill_sender_options options;
  options.basis.context = context_;
  options.basis.started = around_.now();
  options.basis.link = link;
  options.basis.geometry = *mapping;
  options.basis.transfer = transfer;
  options.basis.request = request.request;
  options.basis.tokens = {request.token_begin, request.token_end};
  options.basis.local = std::move(tables);
  options.basis.kept = std::move(kept);
  options.basis.local_state_slot = src.spec().state_slot;
  if (auto adopted = adopt_destination(options.basis, request); !adopted) {
    refuse_request(link, transfer, adopted.error());
    return;
  }
  options.ready = ready_of(src, **mapping);
  options.sealed_tokens = src.sealed_tokens();
  options.aux = src.aux();
  options.deadline = deadline + patience_for_its_word;
  learn_replicas(src);
  src.taken_by(transfer, {link.peer, replica_of(link.peer), request.rank, request.ranks,
                          link.peer_incarnation.value, request.again});
  leases_.meet(operation, transfer, link.peer, link.peer_incarnation, around_.now());
  watch_leases();
  lengthen_if_filled(operation, src);
  if (src.spec().tell_wanted && src.told_wanted.insert(link.peer).second) {
    context_->events.push(
        {operation, event_wanted{link.peer, request.rank, request.ranks, src.wanted(),
                                 request.token_begin, request.token_end}});
  }
  auto report = report_of(request.request, link, "send", "streaming");
  options.request = std::move(request);
  auto sender =
      around_.begin_session(transfer, link, std::make_unique<prefill_sender>(std::move(options)));
  session_begins(operation, transfer, std::move(sender), link, std::move(report),
                 deadline + patience_for_its_word);
}

void operation_runner::no_longer_parked(const parked_request& one) {
  forget_deadline(one.until, timer::parked, one.request.transfer.value);
  --parked_count_;
  const auto [first, last] = parked_as_.equal_range(one.request.transfer);
  parked_as_.erase(std::find_if(
      first, last, [&](const auto& entry) { return entry.second == one.request.request; }));
  const auto of_peer = parked_of_.find(one.link.peer);
  if (--of_peer->second == 0) parked_of_.erase(of_peer);
  parked_bytes_ -= bytes_of(one.request);
}

/// Answers a request from its live source, from how that source ended, or from its having been
/// given back. Returns false if nobody has offered it.
bool operation_runner::answer(const link_handle& link, transfer_request& request,
                              time_point deadline) {
  if (const auto of = source_of_.find(request.request); of != source_of_.end()) {
    start_sender(of->second, link, std::move(request), deadline);
    return true;
  }
  const auto* ended = ended_.find(request.request);
  const bool is_sent_again =
      request.again && ended != nullptr && ended->came == ended_requests::how::delivered;
  if (ended != nullptr && !is_sent_again) {
    refuse_request(link, request.transfer, ended->told);
    return true;
  }
  // The message that gave it back may have overtaken the request: another actor sends it.
  if (const auto* given_back = given_back_.find(request.request)) {
    refuse_request(link, request.transfer, given_back->told);
    return true;
  }
  return false;
}

/// Answering one of the waiting requests may end the source for the others.
void operation_runner::unpark(const std::string& request) {
  const auto found = parked_.find(request);
  if (found == parked_.end()) return;
  auto waiting = std::move(found->second);
  parked_.erase(found);
  for (auto& one : waiting) {
    no_longer_parked(one);
    (void)answer(one.link, one.request, one.deadline);
  }
}

void operation_runner::on_start_send(start_send& order) {
  const auto deadline = deadline_after(order.spec.deadline);
  const auto request = order.spec.request;
  const auto layers = static_cast<std::uint32_t>(context_->layout->layers.size());
  sources_.emplace(order.operation, source{std::move(order.spec), layers, deadline})
      .first->second.began = around_.now();
  source_of_[request] = order.operation;
  std::optional<troupe::error> unwanted;
  if (const auto* end = given_back_.find(request)) unwanted = end->told;
  given_back_.forget(request);
  ended_.forget(request);
  deadlines_.emplace(deadline, timer::operation, order.operation.value);
  if (stopping_) unwanted = {errc::aborted, "the node stops"};
  if (unwanted) {
    conclude_source(order.operation, unwanted, session_event{abort_session{*unwanted}});
    unpark(request);
    return;
  }
  for (const auto& node : sources_.at(order.operation).spec().held_for) {
    leases_.hold(order.operation, node, around_.now());
  }
  watch_leases();
  unpark(request);
}

void operation_runner::on_send_grew(send_grew& order) {
  const auto found = sources_.find(order.operation);
  if (found == sources_.end() || found->second.concluded) {
    // The source has ended meanwhile and gives back its own pins without these blocks.
    if (context_->pool) unpin_blocks("that has ended", order.more.blocks);
    return;
  }
  auto& src = found->second;
  src.add_blocks(order.more.blocks, order.more.group);
  for (const auto sender : src.senders()) tell_session(sender, session_event{order.more});
}

void operation_runner::grow(source& src, const source_progress& more) {
  src.computed(more.layer_begin, more.layer_end, more.token_end);
  for (const auto sender : src.senders()) tell_session(sender, session_event{more});
}

void operation_runner::complete(operation_id operation, source& src, source_sealed& seal) {
  // A seal says that every layer is ready up to its tokens, whether or not each was reported
  // before.
  const source_progress all{0, static_cast<std::uint32_t>(context_->layout->layers.size()),
                            seal.tokens};
  for (const auto sender : src.senders()) {
    tell_session(sender, session_event{all});
    tell_session(sender, session_event{seal});
  }
  src.seal(seal.tokens, std::move(seal.aux));
  leases_.sealed(operation, around_.now());
  watch_leases();
}

/// Applies what the GPU has completed by now.
void operation_runner::go_on(operation_id operation, source& src) {
  const auto line = compute_.find(operation);
  if (line == compute_.end()) return;
  for (auto& said : line->second.take()) {
    if (auto* more = std::get_if<source_progress>(&said)) {
      grow(src, *more);
    } else {
      complete(operation, src, std::get<source_sealed>(said));
    }
  }
  if (line->second.empty()) compute_.erase(line);
}

void operation_runner::on_send_progress(send_progress& order) {
  const auto found = sources_.find(order.operation);
  if (found == sources_.end() || found->second.concluded) return;
  if (order.point == 0 && !compute_.contains(order.operation)) {
    grow(found->second, order.progress);
    return;
  }
  compute_[order.operation].add(order.progress, order.point);
  go_on(order.operation, found->second);
}

void operation_runner::on_send_sealed(send_sealed& order) {
  const auto found = sources_.find(order.operation);
  if (found == sources_.end() || found->second.concluded) return;
  if (!compute_.contains(order.operation)) {
    complete(order.operation, found->second, order.seal);
    return;
  }
  compute_[order.operation].add(std::move(order.seal), 0);
  go_on(order.operation, found->second);
}

void operation_runner::on_gpu_point_reached(gpu_point_reached& news) {
  const auto found = sources_.find(news.send);
  if (found == sources_.end() || found->second.concluded) return;
  if (news.failure) {
    conclude_source(news.send, news.failure, session_event{abort_session{*news.failure}});
    return;
  }
  compute_[news.send].reached(news.point);
  go_on(news.send, found->second);
}

/// Why the placement that a decode rank follows is void. Empty if it is valid.
std::optional<troupe::error> operation_runner::void_placement(
    const link_handle& link, const transfer_request& request) const {
  const membership_mark placed{request.placed_by, request.placed_at};
  const auto last = context_->registration.last();
  auto why = check_own_placement(*members_, context_->self,
                                 {last.supervisor_incarnation, last.epoch}, placed);
  if (!why) why = check_placement(*members_, link.peer, link.peer_incarnation.value, placed);
  return why;
}

/// Whether a request may wait here for a prefill that may never come: it must name exactly as many
/// blocks as its tokens need, no more of those than this node could fill, and no more beside them
/// than a transfer can use; and all parked requests together may take only so much memory.
result<void> operation_runner::room_to_park(const link_handle& link,
                                            const transfer_request& request) const {
  const auto& peer = link.peer;
  const auto of_peer = parked_of_.find(peer);
  if (of_peer != parked_of_.end() && of_peer->second >= context_->settings.max_parked) {
    return fail(errc::overloaded, count_of(of_peer->second, "receive") + " of " + peer +
                                      " wait here for requests that are not sent yet, at most " +
                                      std::to_string(context_->settings.max_parked) +
                                      " may (limits.max_parked)");
  }
  if (!context_->layout) {
    return fail(errc::layout_mismatch,
                context_->self.name + " has no cache of blocks, and offers no request");
  }
  const auto& layout = *context_->layout;
  const auto named = count_named(request.blocks, request.groups);
  // In read mode it names no blocks.
  const auto needed =
      request.mode == transfer_mode::write
          ? count_needed(layout, {request.token_begin, request.token_end}, request.groups)
          : 0;
  const auto most = std::uint64_t{layout.blocks} * kvcache::block_tables(layout);
  if (named != needed || needed > most) {
    return fail(errc::out_of_range,
                "the request names " + std::to_string(named) + " blocks for tokens " +
                    std::to_string(request.token_begin) + " to " +
                    std::to_string(request.token_end) + ", which are in " + std::to_string(needed) +
                    "; the cache here has " + std::to_string(layout.blocks) + " blocks");
  }
  const auto regions = link.peer_layout ? kvcache::region_sizes(*link.peer_layout).size() : 0;
  if (request.grants.size() > regions) {
    return fail(errc::out_of_range, "the request has " + count_of(request.grants.size(), "grant") +
                                        ", the cache of " + peer + " has " +
                                        count_of(regions, "region"));
  }
  if (request.state_slots.size() > 1) {
    return fail(errc::out_of_range, "the request names " +
                                        std::to_string(request.state_slots.size()) +
                                        " slots of state tensors, of which it has one");
  }
  if (request.progress && request.progress->here.size() > layout.layers.size()) {
    return fail(errc::out_of_range,
                "the request reports progress on " + std::to_string(request.progress->here.size()) +
                    " layers, the cache here has " + std::to_string(layout.layers.size()));
  }
  if (parked_bytes_ + bytes_of(request) > max_parked_bytes) {
    return fail(errc::overloaded, "requests that wait here for their prefill take " +
                                      std::to_string(parked_bytes_) + " bytes, at most " +
                                      std::to_string(max_parked_bytes) + " may be");
  }
  return {};
}

void operation_runner::request_came(const link_handle& link, transfer_request request) {
  if (stopping_) {
    refuse_request(link, request.transfer, {errc::aborted, "the node stops"});
    return;
  }
  const auto& self_info = context_->self;
  auto meant = check_life(self_info.name, self_info.incarnation, request.life);
  // Without a cache, it is refused when it meets its source, which has no cache either.
  if (meant && context_->layout) meant = check_groups(*context_->layout, request.groups);
  if (!meant) {
    refuse_request(link, request.transfer, meant.error());
    return;
  }
  // A transfer that already moves goes on, whatever the cluster decides meanwhile.
  if (!request.progress) {
    if (const auto why = void_placement(link, request)) {
      refuse_request(link, request.transfer, *why);
      return;
    }
  }
  // Sent again: the parked copy has grants of a link that broke.
  if (request.progress) {
    drop_parked_of(request.transfer,
                   [&](const parked_request& one) { return one.link.id == link.id; });
  }
  const auto deadline = around_.now() + std::chrono::milliseconds{request.deadline_ms};
  if (answer(link, request, deadline)) return;
  // Late request of a decode node that has left: it must not take a source that the node's next
  // life asks for.
  const auto watched = watched_links_.find(link.id);
  if (watched != watched_links_.end() && watched->second) return;
  if (auto served = room_to_serve(); !served) {
    refuse_request(link, request.transfer, served.error());
    return;
  }
  if (auto room = room_to_park(link, request); !room) {
    refuse_request(link, request.transfer, room.error());
    return;
  }
  if (request.park_ms == 0U) {
    refuse_request(link, request.transfer, not_offered(request.request));
    return;
  }
  auto until = deadline;
  if (request.park_ms)
    until = std::min(until, around_.now() + std::chrono::milliseconds{*request.park_ms});
  ++parked_count_;
  ++parked_of_[link.peer];
  parked_as_.emplace(request.transfer, request.request);
  parked_bytes_ += bytes_of(request);
  deadlines_.emplace(until, timer::parked, request.transfer.value);
  auto& waiting = parked_[request.request];
  waiting.push_back({link, std::move(request), deadline, until});
}

troupe::error not_offered(const std::string& request) {
  return {errc::not_found, "request `" + request +
                               "` is not offered here, and the time to wait for it is over; ask "
                               "with a longer `park`, or later"};
}

operation_runner::parked_requests::iterator operation_runner::drop_parked_at(
    parked_requests::iterator of, const std::function<bool(const parked_request&)>& gone) {
  auto& waiting = of->second;
  for (auto one = waiting.begin(); one != waiting.end();) {
    if (!gone(*one)) {
      ++one;
      continue;
    }
    no_longer_parked(*one);
    one = waiting.erase(one);
  }
  return waiting.empty() ? parked_.erase(of) : std::next(of);
}

void operation_runner::drop_parked(const std::function<bool(const parked_request&)>& gone) {
  for (auto of = parked_.begin(); of != parked_.end();) of = drop_parked_at(of, gone);
}

void operation_runner::drop_parked_for(const std::string& request,
                                       const std::function<bool(const parked_request&)>& gone) {
  if (const auto of = parked_.find(request); of != parked_.end()) drop_parked_at(of, gone);
}

void operation_runner::drop_parked_of(transfer_id transfer,
                                      const std::function<bool(const parked_request&)>& gone) {
  // Peers choose the transfer ids: several requests may have the same one.
  std::vector<std::string> requests;
  const auto [first, last] = parked_as_.equal_range(transfer);
  for (auto one = first; one != last; ++one) requests.push_back(one->second);
  for (const auto& request : requests) {
    drop_parked_for(request, [&](const parked_request& one) {
      return one.request.transfer == transfer && gone(one);
    });
  }
}

void operation_runner::place_lost(operation_id operation, source& src, troupe::error why) {
  src.last_loss = why;
  // Enough other ranks have come, or live and will come.
  if (!src.has_open_place(leases_.waiting(operation))) return;
  const auto window = context_->settings.retry_window;
  if (window.count() == 0) {
    const session_event to_others{abort_session{why}};
    conclude_source(operation, std::move(why), to_others);
    return;
  }
  // The source stays for another decode rank; the engine is told if none comes.
  const auto until = std::min(src.deadline(), around_.now() + window);
  forget_deadline(src.deadline(), timer::operation, operation.value);
  src.shorten(until, std::move(why));
  deadlines_.emplace(until, timer::operation, operation.value);
}

void operation_runner::place_reopened(operation_id operation, source& src) {
  const bool waits = context_->settings.retry_window.count() > 0;
  if (waits && src.last_loss) place_lost(operation, src, troupe::error{*src.last_loss});
}

void operation_runner::sender_concluded(operation_id operation, session_concluded& outcome) {
  auto& src = sources_.at(operation);
  if (src.concluded) return;
  leases_.leave(operation, outcome.transfer, around_.now());
  if (outcome.refused) {
    src.not_taken_by(outcome.transfer);
    place_reopened(operation, src);
    return;
  }
  if (!outcome.failure) {
    src.moved.add(outcome.moved);
    learn_replicas(src);
    if (src.released(outcome.transfer, outcome.bytes))
      conclude_source(operation, std::nullopt, {deadline_reached{}});
    return;
  }
  rank_failed(operation, outcome.transfer, std::move(*outcome.failure));
}

// An abort by our own engine, or a failure of its computation, has concluded the source before its
// senders hear of it: a failure here is that of one decode rank.
void operation_runner::rank_failed(operation_id operation, transfer_id transfer,
                                   troupe::error why) {
  auto& src = sources_.at(operation);
  if (context_->settings.retry_window.count() > 0) {
    src.lost_one(transfer);
    place_lost(operation, src, std::move(why));
    return;
  }
  const session_event to_others{abort_session{why}};
  conclude_source(operation, std::move(why), to_others);
}

}  // namespace troupe::actors::operations
