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
#include "troupe/actors/port/engine_port_parts.hpp"
#include "troupe/actors/runtime/inline_executor.hpp"
#include "troupe/actors/transfer/send_session.hpp"
#include "troupe/kvcache/block_list.hpp"

namespace troupe::actors::port {

void release_source(self_pointer self, operation_id operation) {
  auto& st = self->state;
  const auto found = st.sources.find(operation);
  if (found == st.sources.end() || !found->second.concluded || !found->second.senders().empty())
    return;
  const auto& spec = found->second.spec();
  if (st.context->pool) unpin_blocks(st, spec.request, spec.blocks);
  st.sources.erase(found);
  st.context->events.push_last({operation, event_unpinned{}});
}

std::string replica_of(const engine_port_state& st, const std::string& node) {
  const member* m = find_member(*st.members, node);
  if (m == nullptr) return "";
  // A supervisor that is restarted gives those that joined other numbers.
  const auto& joined = m->node.replica_name;
  return m->node.stage + "/" + (joined.empty() ? std::to_string(m->node.replica) : joined);
}

namespace {

void learn_replicas(const engine_port_state& st, source& src) {
  src.learn_replicas([&st](const std::string& node) { return replica_of(st, node); });
}

}  // namespace

void lengthen_if_filled(engine_port_state& st, operation_id operation, source& src) {
  if (!src.lost() || src.has_open_place(st.leases.waiting(operation))) return;
  forget_deadline(st, src.deadline(), timer::operation, operation.value);
  src.lengthen();
  st.deadlines.emplace(src.deadline(), timer::operation, operation.value);
}

void place_ranks(self_pointer self) {
  auto& st = self->state;
  std::vector<operation_id> delivered;
  for (auto& [operation, src] : st.sources) {
    if (src.concluded) continue;
    learn_replicas(st, src);
    lengthen_if_filled(st, operation, src);
    if (src.is_delivered()) delivered.push_back(operation);
  }
  for (const auto operation : delivered)
    conclude_source(self, operation, std::nullopt, {deadline_reached{}});
}

void conclude_source(self_pointer self, operation_id operation,
                     std::optional<troupe::error> failure, const session_event& to_senders) {
  auto& st = self->state;
  auto& src = st.sources.at(operation);
  if (src.concluded) return;
  src.concluded = true;
  st.compute.erase(operation);
  st.leases.end(operation);
  const auto& request = src.spec().request;
  forget_deadline(st, src.deadline(), timer::operation, operation.value);
  if (const auto of = st.source_of.find(request);
      of != st.source_of.end() && of->second == operation) {
    st.source_of.erase(of);
  }
  using ended_how = ended_requests::how;
  if (failure) {
    st.ended.remember(request, {ended_how::failed, *failure});
  } else {
    st.ended.remember(request,
                      {ended_how::delivered,
                       {errc::not_found, "request `" + request + "` was delivered already"}});
  }
  tell_holders(st, src, failure);
  count_outcome(st, failure, src.bytes());
  if (failure) {
    tell_outcome(st, operation, event_failed{*failure});
    for (const auto sender : src.senders()) tell_session(st, sender, to_senders);
  } else {
    tell_outcome(st, operation, event_done{{}, src.bytes(), src.moved.told(src.began, now())});
  }
  release_source(self, operation);
}

namespace {

constexpr std::size_t max_parked_bytes = std::size_t{256} << 20;

/// The decode rank says what became of its receive at its deadline: released, or given up. Its word must not
/// cross ours, or it is done there and failed here.
constexpr std::chrono::seconds patience_for_its_word{1};

/// Up to which token a source that grows may come: its blocks are of one pool, and with groups only a window of
/// what it has computed is in them. What a peer wants of them is listed, block by block.
std::uint64_t growing_room(const kvcache::cache_layout& layout) noexcept {
  constexpr std::uint64_t longest_prompt = std::uint64_t{1} << 24;
  if (!layout.groups.empty()) return longest_prompt;
  return std::uint64_t{layout.blocks} * layout.block_tokens;
}

/// Whether the source holds, of each group of layers, all that the decode side keeps of it.
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

/// How far the layers are that the decode rank holds as well.
std::vector<std::uint32_t> ready_of(const source& src, const kvcache::transfer_geometry& geometry) {
  const auto shared =
      std::span{src.ready()}.subspan(geometry.first_local_layer(), geometry.layers());
  return {shared.begin(), shared.end()};
}

/// `deadline` is the decode rank's, which counts since it asked.
void start_sender(self_pointer self, operation_id operation, const link_handle& link,
                  transfer_request request, time_point deadline) {
  auto& st = self->state;
  auto& src = st.sources.at(operation);
  const auto transfer = request.transfer;
  if (const auto live = st.sessions.find(transfer); live != st.sessions.end()) {
    if (live->second.link == link.actor.id()) pass_on(live->second, link, std::move(request));
    return;
  }
  auto mapping = geometry(st, link, kvcache::data_flow::to_remote);
  if (!mapping) {
    refuse_request(link, transfer, mapping.error());
    return;
  }
  const auto& settings = st.context->settings;
  if (auto its = check_rank_of(settings, request, link.peer, *link.peer_layout); !its) {
    refuse_request(link, transfer, its.error());
    return;
  }
  const auto stage = stage_of_peer(*st.context, link.peer);
  auto edge = stage ? result<void>{} : fail(stage.error());
  if (stage && !stage->empty()) {
    edge = check_edge(settings, st.context->self.stage, *stage, request.mode);
  }
  if (!edge) {
    refuse_request(link, transfer, edge.error());
    return;
  }
  if (auto served = room_to_serve(st); !served) {
    refuse_request(link, transfer, served.error());
    return;
  }
  if (!(*mapping)->moves_anything()) request.token_begin = request.token_end;
  const auto& layout = *st.context->layout;
  auto tables = tables_of(layout, src.spec().blocks, src.spec().groups);
  auto kept = kept_of(request.groups);
  if (auto holds = check_held(request, layout, tables); !holds) {
    refuse_alone(link, transfer, holds.error());
    return;
  }
  // What a send that grows has no blocks of yet, its seal will say.
  const auto room = src.spec().grows ? growing_room(layout) : room_of(layout, tables);
  if (request.token_begin < request.token_end && request.token_end > room) {
    const troupe::error why{errc::out_of_range,
                            "the request wants " + std::to_string(request.token_end) +
                                " tokens, the blocks of the prefill engine hold " +
                                std::to_string(room)};
    refuse_request(link, transfer, why);
    if (settings.retry_window.count() == 0) {
      conclude_source(self, operation, why, session_event{abort_session{why}});
    }
    return;
  }
  if (src.sealed_tokens()) {
    // A wrong id is its decode rank's affair: the source goes on for whom it is.
    if (auto unmet = check_expected(request.expect, src.aux())) {
      refuse_alone(link, transfer, *unmet);
      return;
    }
  }
  prefill_sender_options options;
  options.basis.context = st.context;
  options.basis.port = caf::actor_cast<engine_port_actor>(self);
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
  learn_replicas(st, src);
  src.taken_by(transfer, {link.peer, replica_of(st, link.peer), request.rank, request.ranks,
                          link.peer_incarnation.value, request.again});
  st.leases.meet(operation, transfer, link.peer, link.peer_incarnation, now());
  watch_leases(st);
  lengthen_if_filled(st, operation, src);
  if (src.spec().tell_wanted && src.told_wanted.insert(link.peer).second) {
    st.context->events.push(
        {operation, event_wanted{link.peer, request.rank, request.ranks, src.wanted(),
                                 request.token_begin, request.token_end}});
  }
  auto report = report_of(request.request, link, "send", "streaming");
  options.request = std::move(request);
  auto sender = self->spawn<caf::monitored>(prefill_sender, std::move(options));
  session_begins(st, operation, transfer, std::move(sender), link, std::move(report),
                 deadline + patience_for_its_word);
}

void no_longer_parked(engine_port_state& st, const parked_request& one) {
  forget_deadline(st, one.until, timer::parked, one.request.transfer.value);
  --st.parked_count;
  const auto [first, last] = st.parked_as.equal_range(one.request.transfer);
  st.parked_as.erase(std::find_if(
      first, last, [&](const auto& entry) { return entry.second == one.request.request; }));
  const auto of_peer = st.parked_of.find(one.link.peer);
  if (--of_peer->second == 0) st.parked_of.erase(of_peer);
  st.parked_bytes -= bytes_of(one.request);
}

/// By the request's live source, as that source ended, or as one given back. False: nobody has offered it.
bool answer(self_pointer self, const link_handle& link, transfer_request& request,
            time_point deadline) {
  auto& st = self->state;
  if (const auto of = st.source_of.find(request.request); of != st.source_of.end()) {
    start_sender(self, of->second, link, std::move(request), deadline);
    return true;
  }
  const auto* ended = st.ended.find(request.request);
  const bool is_sent_again =
      request.again && ended != nullptr && ended->came == ended_requests::how::delivered;
  if (ended != nullptr && !is_sent_again) {
    refuse_request(link, request.transfer, ended->told);
    return true;
  }
  // The word that gave it back may have overtaken the request: another actor sends it.
  if (const auto* given_back = st.given_back.find(request.request)) {
    refuse_request(link, request.transfer, given_back->told);
    return true;
  }
  return false;
}

/// One of those that wait may end the source for the others.
void unpark(self_pointer self, const std::string& request) {
  auto& st = self->state;
  const auto found = st.parked.find(request);
  if (found == st.parked.end()) return;
  auto waiting = std::move(found->second);
  st.parked.erase(found);
  for (auto& one : waiting) {
    no_longer_parked(st, one);
    (void)answer(self, one.link, one.request, one.deadline);
  }
}

}  // namespace

void on_start_send(self_pointer self, start_send& order) {
  auto& st = self->state;
  const auto deadline = deadline_after(st, order.spec.deadline);
  const auto request = order.spec.request;
  const auto layers = static_cast<std::uint32_t>(st.context->layout->layers.size());
  st.sources.emplace(order.operation, source{std::move(order.spec), layers, deadline})
      .first->second.began = now();
  st.source_of[request] = order.operation;
  std::optional<troupe::error> unwanted;
  if (const auto* end = st.given_back.find(request)) unwanted = end->told;
  st.given_back.forget(request);
  st.ended.forget(request);
  st.deadlines.emplace(deadline, timer::operation, order.operation.value);
  if (st.stopping) unwanted = {errc::aborted, "the node stops"};
  if (unwanted) {
    conclude_source(self, order.operation, unwanted, session_event{abort_session{*unwanted}});
    unpark(self, request);
    return;
  }
  for (const auto& node : st.sources.at(order.operation).spec().held_for) {
    st.leases.hold(order.operation, node, now());
  }
  watch_leases(st);
  unpark(self, request);
}

void on_send_grew(self_pointer self, send_grew& order) {
  auto& st = self->state;
  const auto found = st.sources.find(order.operation);
  if (found == st.sources.end() || found->second.concluded) {
    // It has ended meanwhile: what it pinned is given back without these.
    if (st.context->pool) unpin_blocks(st, "that has ended", order.more.blocks);
    return;
  }
  auto& src = found->second;
  src.add_blocks(order.more.blocks, order.more.group);
  for (const auto sender : src.senders()) tell_session(st, sender, session_event{order.more});
}

namespace {

void grow(engine_port_state& st, source& src, const source_progress& more) {
  src.computed(more.layer_begin, more.layer_end, more.token_end);
  for (const auto sender : src.senders()) tell_session(st, sender, session_event{more});
}

void complete(engine_port_state& st, operation_id operation, source& src, source_sealed& seal) {
  // A seal says that every layer is ready up to there, whether or not each was reported before.
  const source_progress all{0, static_cast<std::uint32_t>(st.context->layout->layers.size()),
                            seal.tokens};
  for (const auto sender : src.senders()) {
    tell_session(st, sender, session_event{all});
    tell_session(st, sender, session_event{seal});
  }
  src.seal(seal.tokens, std::move(seal.aux));
  st.leases.sealed(operation, now());
  watch_leases(st);
}

/// What of the line is true by now.
void go_on(engine_port_state& st, operation_id operation, source& src) {
  const auto line = st.compute.find(operation);
  if (line == st.compute.end()) return;
  for (auto& said : line->second.take()) {
    if (auto* more = std::get_if<source_progress>(&said)) {
      grow(st, src, *more);
    } else {
      complete(st, operation, src, std::get<source_sealed>(said));
    }
  }
  if (line->second.empty()) st.compute.erase(line);
}

}  // namespace

void on_send_progress(self_pointer self, send_progress& order) {
  auto& st = self->state;
  const auto found = st.sources.find(order.operation);
  if (found == st.sources.end() || found->second.concluded) return;
  if (order.point == 0 && !st.compute.contains(order.operation)) {
    grow(st, found->second, order.progress);
    return;
  }
  st.compute[order.operation].add(order.progress, order.point);
  go_on(st, order.operation, found->second);
}

void on_send_sealed(self_pointer self, send_sealed& order) {
  auto& st = self->state;
  const auto found = st.sources.find(order.operation);
  if (found == st.sources.end() || found->second.concluded) return;
  if (!st.compute.contains(order.operation)) {
    complete(st, order.operation, found->second, order.seal);
    return;
  }
  st.compute[order.operation].add(std::move(order.seal), 0);
  go_on(st, order.operation, found->second);
}

void on_gpu_point_reached(self_pointer self, gpu_point_reached& news) {
  auto& st = self->state;
  const auto found = st.sources.find(news.send);
  if (found == st.sources.end() || found->second.concluded) return;
  if (news.failure) {
    conclude_source(self, news.send, news.failure, session_event{abort_session{*news.failure}});
    return;
  }
  st.compute[news.send].reached(news.point);
  go_on(st, news.send, found->second);
}

namespace {

/// Why the placement that a decode rank follows counts no more.
std::optional<troupe::error> void_placement(const engine_port_state& st, const link_handle& link,
                                            const transfer_request& request) {
  const epoch_mark placed{request.placed_by, request.placed_at};
  const auto last = st.context->registration.last();
  auto why =
      voided_here(*st.members, st.context->self, {last.supervisor_incarnation, last.epoch}, placed);
  if (!why) why = voided(*st.members, link.peer, link.peer_incarnation.value, placed);
  return why;
}

/// Whether a request may wait here for a prefill that may never come: it names as many blocks as its
/// tokens need, no more of those than this node could fill, with no more beside them than a transfer can
/// use; and all that wait take so much memory.
result<void> room_to_park(const engine_port_state& st, const link_handle& link,
                          const transfer_request& request) {
  const auto& peer = link.peer;
  const auto of_peer = st.parked_of.find(peer);
  if (of_peer != st.parked_of.end() && of_peer->second >= st.context->settings.max_parked) {
    return fail(errc::overloaded, count_of(of_peer->second, "receive") + " of " + peer +
                                      " wait here for requests that are not sent yet, at most " +
                                      std::to_string(st.context->settings.max_parked) +
                                      " may (limits.max_parked)");
  }
  if (!st.context->layout) {
    return fail(errc::layout_mismatch,
                st.context->self.name + " has no cache of blocks, and offers no request");
  }
  const auto& layout = *st.context->layout;
  const auto named = count_named(request.blocks, request.groups);
  // In read mode it names none.
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
                "the request tells of " + std::to_string(request.progress->here.size()) +
                    " layers, the cache here has " + std::to_string(layout.layers.size()));
  }
  if (st.parked_bytes + bytes_of(request) > max_parked_bytes) {
    return fail(errc::overloaded, "requests that wait here for their prefill take " +
                                      std::to_string(st.parked_bytes) + " bytes, at most " +
                                      std::to_string(max_parked_bytes) + " may be");
  }
  return {};
}

}  // namespace

void request_came(self_pointer self, const link_handle& link, transfer_request request) {
  auto& st = self->state;
  if (st.stopping) {
    refuse_request(link, request.transfer, {errc::aborted, "the node stops"});
    return;
  }
  const auto& self_info = st.context->self;
  auto meant = check_life(self_info.name, self_info.incarnation, request.life);
  // Without a cache it is refused when it meets its source, which has none either.
  if (meant && st.context->layout) meant = check_groups(*st.context->layout, request.groups);
  if (!meant) {
    refuse_request(link, request.transfer, meant.error());
    return;
  }
  // What moves already goes on, whatever the cluster thinks meanwhile.
  if (!request.progress) {
    if (const auto why = void_placement(st, link, request)) {
      refuse_request(link, request.transfer, *why);
      return;
    }
  }
  // Said again: the one that waits has grants of a link that broke.
  if (request.progress) {
    drop_parked_of(st, request.transfer, [&](const parked_request& one) {
      return one.link.actor.id() == link.actor.id();
    });
  }
  const auto deadline = now() + std::chrono::milliseconds{request.deadline_ms};
  if (answer(self, link, request, deadline)) return;
  // Read late, of a decode that has left: it must not take a source that its next life asks for.
  const auto watched = st.watched_links.find(link.actor.id());
  if (watched != st.watched_links.end() && watched->second) return;
  if (auto served = room_to_serve(st); !served) {
    refuse_request(link, request.transfer, served.error());
    return;
  }
  if (auto room = room_to_park(st, link, request); !room) {
    refuse_request(link, request.transfer, room.error());
    return;
  }
  if (request.park_ms == 0U) {
    refuse_request(link, request.transfer, not_offered(request.request));
    return;
  }
  auto until = deadline;
  if (request.park_ms) until = std::min(until, now() + std::chrono::milliseconds{*request.park_ms});
  ++st.parked_count;
  ++st.parked_of[link.peer];
  st.parked_as.emplace(request.transfer, request.request);
  st.parked_bytes += bytes_of(request);
  st.deadlines.emplace(until, timer::parked, request.transfer.value);
  auto& waiting = st.parked[request.request];
  waiting.push_back({link, std::move(request), deadline, until});
}

troupe::error not_offered(const std::string& request) {
  return {errc::not_found, "request `" + request +
                               "` is not offered here, and was to wait no longer for that; ask "
                               "with a longer `park`, or later"};
}

namespace {

using parked_requests = std::unordered_map<std::string, std::vector<parked_request>>;

parked_requests::iterator drop_parked_at(engine_port_state& st, parked_requests::iterator of,
                                         const std::function<bool(const parked_request&)>& gone) {
  auto& waiting = of->second;
  for (auto one = waiting.begin(); one != waiting.end();) {
    if (!gone(*one)) {
      ++one;
      continue;
    }
    no_longer_parked(st, *one);
    one = waiting.erase(one);
  }
  return waiting.empty() ? st.parked.erase(of) : std::next(of);
}

}  // namespace

void drop_parked(engine_port_state& st, const std::function<bool(const parked_request&)>& gone) {
  for (auto of = st.parked.begin(); of != st.parked.end();) of = drop_parked_at(st, of, gone);
}

void drop_parked_for(engine_port_state& st, const std::string& request,
                     const std::function<bool(const parked_request&)>& gone) {
  if (const auto of = st.parked.find(request); of != st.parked.end()) drop_parked_at(st, of, gone);
}

void drop_parked_of(engine_port_state& st, transfer_id transfer,
                    const std::function<bool(const parked_request&)>& gone) {
  // Peers choose the numbers: several requests may have one.
  std::vector<std::string> requests;
  const auto [first, last] = st.parked_as.equal_range(transfer);
  for (auto one = first; one != last; ++one) requests.push_back(one->second);
  for (const auto& request : requests) {
    drop_parked_for(st, request, [&](const parked_request& one) {
      return one.request.transfer == transfer && gone(one);
    });
  }
}

void place_lost(self_pointer self, operation_id operation, source& src, troupe::error why) {
  auto& st = self->state;
  // Others that are as many as it is for have come, or live and will come.
  if (!src.has_open_place(st.leases.waiting(operation))) return;
  const auto window = st.context->settings.retry_window;
  if (window.count() == 0) {
    const session_event to_others{abort_session{why}};
    conclude_source(self, operation, std::move(why), to_others);
    return;
  }
  // The source stays for another decode rank; the engine hears of it if none comes.
  const auto until = std::min(src.deadline(), now() + window);
  forget_deadline(st, src.deadline(), timer::operation, operation.value);
  src.shorten(until, std::move(why));
  st.deadlines.emplace(until, timer::operation, operation.value);
}

void sender_concluded(self_pointer self, operation_id operation, session_concluded& outcome) {
  auto& st = self->state;
  auto& src = st.sources.at(operation);
  if (src.concluded) return;
  st.leases.leave(operation, outcome.transfer, now());
  if (outcome.refused) {
    src.not_taken_by(outcome.transfer);
    return;
  }
  if (!outcome.failure) {
    src.moved.add(outcome.moved);
    learn_replicas(st, src);
    if (src.released(outcome.transfer, outcome.bytes))
      conclude_source(self, operation, std::nullopt, {deadline_reached{}});
    return;
  }
  rank_failed(self, operation, outcome.transfer, std::move(*outcome.failure));
}

// What our own engine gives up, and what fails in its computing, has concluded the source before its
// senders hear of it: what is told here is of one decode rank.
void rank_failed(self_pointer self, operation_id operation, transfer_id transfer,
                 troupe::error why) {
  auto& src = self->state.sources.at(operation);
  if (self->state.context->settings.retry_window.count() > 0) {
    src.lost_one(transfer);
    place_lost(self, operation, src, std::move(why));
    return;
  }
  const session_event to_others{abort_session{why}};
  conclude_source(self, operation, std::move(why), to_others);
}

}  // namespace troupe::actors::port
