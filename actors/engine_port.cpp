#include "troupe/actors/engine_port.hpp"

#include <algorithm>
#include <chrono>
#include <tuple>
#include <utility>

#include <caf/send.hpp>
#include <spdlog/spdlog.h>

#include "troupe/actors/decode_receiver.hpp"
#include "troupe/actors/inline_unit.hpp"
#include "troupe/actors/logging.hpp"
#include "troupe/actors/prefill_sender.hpp"
#include "troupe/actors/system.hpp"
#include "troupe/actors/value_client.hpp"
#include "troupe/actors/value_server.hpp"

namespace troupe::actors {

namespace {

using self_pointer = engine_port_actor::stateful_pointer<engine_port_state>;
using timer = engine_port_state::timer;

/// Precision of deadlines.
constexpr auto tick_interval = std::chrono::milliseconds{10};

/// Of a session that only its peer's liveness bounds.
constexpr auto no_deadline = time_point::max();

time_point now() {
  return std::chrono::steady_clock::now();
}

void arm(self_pointer self) {
  auto& st = self->state;
  if (st.ticking || st.deadlines.empty()) return;
  st.ticking = true;
  self->delayed_send(self, tick_interval, tick_atom::value);
}

void forget_deadline(engine_port_state& st, time_point when, timer what, std::uint64_t id) {
  st.deadlines.erase({when, what, id});
}

transfer_id new_transfer(engine_port_state& st) {
  for (;;) {
    const transfer_id id{st.random()};
    if (id.value != 0 && !st.sessions.contains(id)) return id;
  }
}

time_point deadline_after(const engine_port_state& st, std::chrono::milliseconds wanted) {
  return now() + (wanted.count() > 0 ? wanted : st.context->settings.default_deadline);
}

/// The mapping between our cache and the peer's, made once per peer.
result<std::shared_ptr<const kvcache::transfer_geometry>> geometry(engine_port_state& st,
                                                                   const link_handle& link,
                                                                   kvcache::data_flow flow) {
  if (!st.context->layout) {
    return fail(errc::layout_mismatch, "this node has no cache of blocks; give its stage a model");
  }
  if (!link.peer_layout) {
    return fail(errc::layout_mismatch,
                link.peer + " has no cache of blocks; give its stage a model");
  }
  auto& known = flow == kvcache::data_flow::to_remote ? st.send_geometry : st.receive_geometry;
  auto& entry = known[link.peer_incarnation];
  if (!entry) {
    auto made = kvcache::transfer_geometry::create(*st.context->layout, *link.peer_layout, flow);
    if (!made) {
      known.erase(link.peer_incarnation);
      return fail(made.error());
    }
    entry = std::make_shared<const kvcache::transfer_geometry>(std::move(*made));
  }
  return entry;
}

void session_begins(engine_port_state& st, operation_id operation, transfer_id transfer,
                    session_actor session, const link_handle& link, transfer_report report,
                    time_point deadline) {
  report.transfer = transfer.value;
  if (deadline != no_deadline) st.deadlines.emplace(deadline, timer::session, transfer.value);
  st.sessions.emplace(transfer, live_session{operation, std::move(session), link.actor.id(),
                                             std::move(report), deadline});
  st.context->counters.active_transfers.store(static_cast<std::uint32_t>(st.sessions.size()));
}

void session_ends(engine_port_state& st, transfer_id transfer) {
  const auto found = st.sessions.find(transfer);
  if (found == st.sessions.end()) return;
  forget_deadline(st, found->second.deadline, timer::session, transfer.value);
  st.sessions.erase(found);
  st.context->counters.active_transfers.store(static_cast<std::uint32_t>(st.sessions.size()));
}

void tell_session(engine_port_state& st, transfer_id transfer, session_event event) {
  if (const auto found = st.sessions.find(transfer); found != st.sessions.end()) {
    tell(found->second.actor, std::move(event));
  }
}

/// The one outcome of an operation. False: it was told before.
bool tell_outcome(engine_port_state& st, operation_id operation,
                  std::variant<event_done, event_failed> outcome) {
  if (!st.context->operations.end(operation)) return false;
  std::visit([&](auto& what) { st.context->events.push({operation, std::move(what)}); }, outcome);
  return true;
}

void count_outcome(engine_port_state& st, const std::optional<troupe::error>& failure,
                   std::uint64_t bytes) {
  auto& counters = st.context->counters;
  (failure ? counters.transfers_failed : counters.transfers_done).fetch_add(1);
  counters.bytes_moved.fetch_add(bytes);
}

/// Never on this thread, which may be the engine's: the node also calls the engine back.
void ask_for_link(engine_port_state& st, const std::string& peer) {
  caf::anon_send(st.node, node_command{need_link{peer}});
}

// -- sources (prefill side)
// ------------------------------------------------------------------------------------

void refuse_request(const link_handle& link, transfer_id transfer, const troupe::error& why) {
  tell(link.actor, link_command{say{transfer_abort{transfer, why.code, why.message}, {}}});
}

void release_source(self_pointer self, operation_id operation) {
  auto& st = self->state;
  const auto found = st.sources.find(operation);
  if (found == st.sources.end() || !found->second.concluded || !found->second.senders().empty())
    return;
  if (st.context->pool) {
    // Pinned by `engine::send`, so this cannot fail while the bookkeeping is right.
    if (auto unpinned = st.context->pool->unpin(found->second.spec().blocks); !unpinned) {
      logger("port")->error("blocks of request {}: {}", found->second.spec().request,
                            to_string(unpinned.error()));
    }
  }
  st.sources.erase(found);
  st.context->events.push({operation, event_unpinned{}});
}

void conclude_source(self_pointer self, operation_id operation,
                     std::optional<troupe::error> failure, const session_event& to_senders) {
  auto& st = self->state;
  auto& src = st.sources.at(operation);
  if (src.concluded) return;
  src.concluded = true;
  const auto& request = src.spec().request;
  forget_deadline(st, src.deadline(), timer::operation, operation.value);
  if (const auto of = st.source_of.find(request);
      of != st.source_of.end() && of->second == operation) {
    st.source_of.erase(of);
  }
  st.ended.remember(
      request,
      failure ? *failure
              : troupe::error{errc::not_found, "request `" + request + "` was delivered already"});
  count_outcome(st, failure, src.bytes());
  if (failure) {
    tell_outcome(st, operation, event_failed{*failure});
    for (const auto sender : src.senders()) tell_session(st, sender, to_senders);
  } else {
    tell_outcome(st, operation, event_done{{}, src.bytes()});
  }
  release_source(self, operation);
}

void start_sender(self_pointer self, operation_id operation, const link_handle& link,
                  transfer_request request) {
  auto& st = self->state;
  auto& src = st.sources.at(operation);
  const auto transfer = request.transfer;
  if (st.sessions.contains(transfer)) return;  // the same request twice changes nothing
  auto mapping = geometry(st, link, kvcache::data_flow::to_remote);
  if (!mapping) {
    refuse_request(link, transfer, mapping.error());
    return;
  }
  prefill_sender_options options;
  options.basis.context = st.context;
  options.basis.port = caf::actor_cast<engine_port_actor>(self);
  options.basis.link = link;
  options.basis.geometry = *mapping;
  options.basis.transfer = transfer;
  options.basis.request = request.request;
  options.basis.local_blocks = src.spec().blocks;
  options.basis.remote_blocks = request.blocks;
  options.basis.local_state_slot = src.spec().state_slot;
  if (!request.state_slots.empty()) options.basis.remote_state_slot = request.state_slots.front();
  options.ready = src.ready();
  options.sealed_tokens = src.sealed_tokens();
  options.aux = src.aux();
  options.deadline = now() + std::chrono::milliseconds{request.deadline_ms};
  const auto deadline = options.deadline;
  src.taken_by(transfer, request.ranks);
  if (src.lost()) {
    forget_deadline(st, src.deadline(), timer::operation, operation.value);
    src.lengthen();
    st.deadlines.emplace(src.deadline(), timer::operation, operation.value);
  }
  transfer_report report;
  report.request = request.request;
  report.peer = link.peer;
  report.side = "send";
  report.state = "streaming";
  options.request = std::move(request);
  auto sender = self->spawn<caf::monitored>(prefill_sender, std::move(options));
  session_begins(st, operation, transfer, std::move(sender), link, std::move(report), deadline);
}

void unpark(self_pointer self, const std::string& request, operation_id operation) {
  auto& st = self->state;
  const auto found = st.parked.find(request);
  if (found == st.parked.end()) return;
  auto waiting = std::move(found->second);
  st.parked.erase(found);
  for (auto& one : waiting) {
    --st.parked_count;
    forget_deadline(st, one.deadline, timer::parked, one.request.transfer.value);
    start_sender(self, operation, one.link, std::move(one.request));
  }
}

void carry_out(self_pointer self, start_send& order) {
  auto& st = self->state;
  const auto deadline = deadline_after(st, order.spec.deadline);
  const auto request = order.spec.request;
  const auto layers = static_cast<std::uint32_t>(st.context->layout->layers.size());
  st.sources.emplace(order.operation, source{std::move(order.spec), layers, deadline});
  st.source_of[request] = order.operation;
  st.ended.forget(request);
  st.deadlines.emplace(deadline, timer::operation, order.operation.value);
  unpark(self, request, order.operation);
}

void carry_out(self_pointer self, send_progress& order) {
  auto& st = self->state;
  const auto found = st.sources.find(order.operation);
  if (found == st.sources.end()) return;
  const auto& more = order.progress;
  found->second.computed(more.layer_begin, more.layer_end, more.token_end);
  for (const auto sender : found->second.senders()) tell_session(st, sender, session_event{more});
}

void carry_out(self_pointer self, send_sealed& order) {
  auto& st = self->state;
  const auto found = st.sources.find(order.operation);
  if (found == st.sources.end()) return;
  auto& src = found->second;
  // A seal says that every layer is ready up to there, whether or not each was reported before.
  const source_progress all{0, static_cast<std::uint32_t>(st.context->layout->layers.size()),
                            order.seal.tokens};
  for (const auto sender : src.senders()) {
    tell_session(st, sender, session_event{all});
    tell_session(st, sender, session_event{order.seal});
  }
  src.seal(order.seal.tokens, std::move(order.seal.aux));
}

void request_came(self_pointer self, const link_handle& link, transfer_request request) {
  auto& st = self->state;
  if (st.stopping) {
    refuse_request(link, request.transfer, {errc::aborted, "the node stops"});
    return;
  }
  if (const auto of = st.source_of.find(request.request); of != st.source_of.end()) {
    start_sender(self, of->second, link, std::move(request));
    return;
  }
  if (const auto* why = st.ended.find(request.request)) {
    refuse_request(link, request.transfer, *why);
    return;
  }
  if (st.parked_count >= st.context->settings.max_operations) {
    refuse_request(link, request.transfer,
                   {errc::overloaded, "too many requests wait here for their prefill"});
    return;
  }
  const auto deadline = now() + std::chrono::milliseconds{request.deadline_ms};
  ++st.parked_count;
  st.deadlines.emplace(deadline, timer::parked, request.transfer.value);
  auto& waiting = st.parked[request.request];
  waiting.push_back({link, std::move(request), deadline});
}

/// Takes requests out of the parking lot that `gone` says are over.
template <class Predicate>
void drop_parked(engine_port_state& st, Predicate gone) {
  for (auto of = st.parked.begin(); of != st.parked.end();) {
    auto& waiting = of->second;
    for (auto one = waiting.begin(); one != waiting.end();) {
      if (!gone(*one)) {
        ++one;
        continue;
      }
      forget_deadline(st, one->deadline, timer::parked, one->request.transfer.value);
      --st.parked_count;
      one = waiting.erase(one);
    }
    of = waiting.empty() ? st.parked.erase(of) : std::next(of);
  }
}

// -- receives (decode side)
// --------------------------------------------------------------------------------------

void release_receive(self_pointer self, operation_id operation) {
  auto& st = self->state;
  const auto found = st.receives.find(operation);
  if (found == st.receives.end()) return;
  const auto& r = found->second;
  if (r.now != receiving::phase::concluded || r.live != 0) return;
  if (r.pinned) {
    if (auto unpinned = st.context->pool->unpin(r.spec.blocks); !unpinned) {
      logger("port")->error("blocks of request {}: {}", r.spec.request,
                            to_string(unpinned.error()));
    }
  }
  st.receives.erase(found);
  st.context->events.push({operation, event_unpinned{}});
}

void conclude_receive(self_pointer self, operation_id operation,
                      std::optional<troupe::error> failure, const session_event& to_receivers) {
  auto& st = self->state;
  auto& r = st.receives.at(operation);
  if (r.now == receiving::phase::concluded) return;
  if (r.now == receiving::phase::in_line) {
    tell(st.pool, pool_command{leave_line{operation}});
  }
  r.now = receiving::phase::concluded;
  forget_deadline(st, r.deadline, timer::operation, operation.value);
  count_outcome(st, failure, r.bytes);
  if (failure) {
    tell_outcome(st, operation, event_failed{*failure});
    for (const auto& rank : r.ranks) {
      if (rank.transfer) tell_session(st, *rank.transfer, to_receivers);
    }
  } else {
    tell_outcome(st, operation, event_done{std::move(r.aux), r.bytes});
  }
  release_receive(self, operation);
}

void fail_receive(self_pointer self, operation_id operation, troupe::error why) {
  const session_event to_receivers{engine_aborts{why}};
  conclude_receive(self, operation, std::move(why), to_receivers);
}

/// Tells the engine of layers that are now complete from every rank, neighbours of equal progress
/// as one.
void tell_layers_of(engine_port_state& st, operation_id operation, receiving& r) {
  const auto layers = static_cast<std::uint32_t>(r.told.size());
  std::vector<std::uint32_t> complete(layers, r.spec.tokens);
  for (const auto& rank : r.ranks) {
    for (std::uint32_t layer = 0; layer < layers; ++layer) {
      const auto landed = rank.transfer ? rank.landed[layer] : r.spec.prefix_tokens;
      complete[layer] = std::min(complete[layer], landed);
    }
  }
  for (std::uint32_t begin = 0; begin < layers;) {
    auto end = begin + 1;
    while (end < layers && complete[end] == complete[begin] && r.told[end] == r.told[begin]) ++end;
    if (complete[begin] > r.told[begin]) {
      st.context->events.push(
          {operation, event_layers{{begin, end, r.told[begin], complete[begin]}}});
      std::fill(r.told.begin() + begin, r.told.begin() + end, complete[begin]);
    }
    begin = end;
  }
}

void start_receiver(self_pointer self, operation_id operation, std::size_t index,
                    const link_handle& link) {
  auto& st = self->state;
  auto& r = st.receives.at(operation);
  auto mapping = geometry(st, link, kvcache::data_flow::to_local);
  if (!mapping) {
    fail_receive(self, operation, mapping.error());
    return;
  }
  auto& rank = r.ranks[index];
  rank.transfer = new_transfer(st);
  const auto& layout = *st.context->layout;
  decode_receiver_options options;
  options.basis.context = st.context;
  options.basis.port = caf::actor_cast<engine_port_actor>(self);
  options.basis.link = link;
  options.basis.geometry = *mapping;
  options.basis.transfer = *rank.transfer;
  options.basis.request = r.spec.request;
  options.basis.local_blocks = r.spec.blocks;
  options.basis.local_state_slot = r.spec.state_slot;
  options.deadline = r.deadline;
  auto& request = options.request;
  request.transfer = *rank.transfer;
  request.request = r.spec.request;
  request.mode = r.spec.mode;
  request.rank = layout.tp_rank;
  request.ranks = layout.tp_size;
  request.token_begin = r.spec.prefix_tokens;
  request.token_end = r.spec.tokens;
  request.blocks = r.spec.blocks;
  if (!layout.states.empty()) request.state_slots = {r.spec.state_slot};
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(r.deadline - now());
  request.deadline_ms = static_cast<std::uint32_t>(
      std::clamp<std::int64_t>(left.count(), 1, std::numeric_limits<std::uint32_t>::max()));
  // A rank whose heads another rank of its replica sends has nothing to tell of layers.
  const bool idle = !(*mapping)->moves_anything();
  rank.landed.assign(layout.layers.size(), idle ? r.spec.tokens : r.spec.prefix_tokens);
  transfer_report report;
  report.request = r.spec.request;
  report.peer = link.peer;
  report.side = "receive";
  report.state = "requested";
  ++r.live;
  const auto transfer = *rank.transfer;
  const auto deadline = r.deadline;
  auto receiver = self->spawn<caf::monitored>(decode_receiver, std::move(options));
  rank.receiver = receiver;
  session_begins(st, operation, transfer, std::move(receiver), link, std::move(report), deadline);
  // The others may have landed everything while this one's link was being made.
  if (idle) tell_layers_of(st, operation, r);
}

/// The blocks are there: reach every rank of the prefill replica.
void begin_moving(self_pointer self, operation_id operation) {
  auto& st = self->state;
  auto& r = st.receives.at(operation);
  r.now = receiving::phase::moving;
  r.told.assign(st.context->layout->layers.size(), r.spec.prefix_tokens);
  for (std::size_t index = 0; index < r.spec.sources.size(); ++index) {
    const auto& peer = r.spec.sources[index];
    r.ranks.push_back({peer, std::nullopt, {}, false, {}});
  }
  for (std::size_t index = 0; index < r.ranks.size(); ++index) {
    const auto& peer = r.ranks[index].peer;
    if (const auto link = st.links.find(peer); link != st.links.end()) {
      start_receiver(self, operation, index, link->second);
      if (st.receives.find(operation) == st.receives.end() ||
          r.now == receiving::phase::concluded) {
        return;
      }
      continue;
    }
    auto& waiting = st.waiting_for_link[peer];
    waiting.push_back(operation);
    if (waiting.size() == 1) ask_for_link(st, peer);
  }
}

void carry_out(self_pointer self, start_receive& order) {
  auto& st = self->state;
  const auto operation = order.operation;
  auto& r = st.receives[operation];
  r.spec = std::move(order.spec);
  r.deadline = deadline_after(st, r.spec.deadline);
  st.deadlines.emplace(r.deadline, timer::operation, operation.value);
  const auto block_tokens = st.context->layout->block_tokens;
  const auto needed = (r.spec.tokens + block_tokens - 1) / block_tokens;
  if (!r.spec.blocks.empty() || needed == 0) {
    r.pinned = st.context->pool != nullptr && !r.spec.blocks.empty();
    begin_moving(self, operation);
    return;
  }
  r.now = receiving::phase::in_line;
  if (!r.spec.fail_when_full) {
    tell(st.pool, pool_command{wait_for_blocks{operation, needed, r.deadline}});
    return;
  }
  auto blocks = st.context->pool
                    ? st.context->pool->allocate(needed)
                    : result<kvcache::allocation>{
                          fail(errc::invalid_config,
                               "this node has no pool of its own; name the destination blocks")};
  self->send(caf::actor_cast<engine_port_actor>(self),
             port_event{blocks_granted{operation, std::move(blocks)}});
}

void happened(self_pointer self, blocks_granted& granted) {
  auto& st = self->state;
  const auto found = st.receives.find(granted.operation);
  const bool wanted = found != st.receives.end() && found->second.now == receiving::phase::in_line;
  if (!wanted) {
    if (granted.blocks) (void)st.context->pool->free(granted.blocks->owner, granted.blocks->blocks);
    return;
  }
  auto& r = found->second;
  if (!granted.blocks) {
    r.now = receiving::phase::linking;
    fail_receive(self, granted.operation, granted.blocks.error());
    return;
  }
  r.spec.blocks = granted.blocks->blocks;
  if (auto pinned = st.context->pool->pin(r.spec.blocks); !pinned) {
    r.now = receiving::phase::linking;
    fail_receive(self, granted.operation, pinned.error());
    return;
  }
  r.pinned = true;
  st.context->events.push({granted.operation, event_allocated{std::move(*granted.blocks)}});
  begin_moving(self, granted.operation);
}

receiving::from_rank* rank_of(receiving& r, transfer_id transfer) {
  const auto found = std::ranges::find_if(
      r.ranks, [&](const receiving::from_rank& rank) { return rank.transfer == transfer; });
  return found == r.ranks.end() ? nullptr : &*found;
}

void happened(self_pointer self, session_layers& layers) {
  auto& st = self->state;
  const auto session = st.sessions.find(layers.transfer);
  if (session == st.sessions.end()) return;
  const auto operation = session->second.operation;
  const auto found = st.receives.find(operation);
  if (found == st.receives.end() || found->second.now == receiving::phase::concluded) return;
  auto* rank = rank_of(found->second, layers.transfer);
  if (rank == nullptr) return;
  session->second.report.state = "receiving";
  const auto& slice = layers.slice;
  for (auto layer = slice.layer_begin; layer < slice.layer_end && layer < rank->landed.size();
       ++layer) {
    rank->landed[layer] = std::max(rank->landed[layer], slice.token_end);
  }
  tell_layers_of(st, operation, found->second);
}

// -- outcomes of sessions
// -------------------------------------------------------------------------------------------

void sender_concluded(self_pointer self, operation_id operation, session_concluded& outcome) {
  auto& st = self->state;
  auto& src = st.sources.at(operation);
  if (src.concluded) return;
  if (!outcome.failure) {
    if (src.released(outcome.bytes))
      conclude_source(self, operation, std::nullopt, {deadline_came{}});
    return;
  }
  const auto window = st.context->settings.retry_window;
  if (outcome.failure->code == errc::peer_lost && window.count() > 0) {
    // The source stays for another decode rank; the engine hears of it if none comes.
    const auto until = std::min(src.deadline(), now() + window);
    forget_deadline(st, src.deadline(), timer::operation, operation.value);
    src.shorten(until, std::move(*outcome.failure));
    st.deadlines.emplace(until, timer::operation, operation.value);
    return;
  }
  const session_event to_others{engine_aborts{*outcome.failure}};
  conclude_source(self, operation, std::move(outcome.failure), to_others);
}

void receiver_concluded(self_pointer self, operation_id operation, session_concluded& outcome) {
  auto& r = self->state.receives.at(operation);
  if (r.now == receiving::phase::concluded) return;
  if (outcome.failure) {
    fail_receive(self, operation, std::move(*outcome.failure));
    return;
  }
  auto* rank = rank_of(r, outcome.transfer);
  if (rank == nullptr) return;
  rank->done = true;
  r.bytes += outcome.bytes;
  // A rank that moves nothing to us may have concluded before its engine sealed, with nothing to
  // say.
  const bool first = rank == &r.ranks.front();
  if (!outcome.aux.empty() && (first || r.aux.empty())) r.aux = std::move(outcome.aux);
  if (std::ranges::all_of(r.ranks, &receiving::from_rank::done)) {
    conclude_receive(self, operation, std::nullopt, {deadline_came{}});
  }
}

void happened(self_pointer self, session_concluded& outcome) {
  auto& st = self->state;
  const auto found = st.sessions.find(outcome.transfer);
  if (found == st.sessions.end()) return;
  const auto operation = found->second.operation;
  found->second.report.state = "fencing";
  found->second.report.bytes = outcome.bytes;
  if (st.sources.contains(operation)) {
    sender_concluded(self, operation, outcome);
  } else if (st.receives.contains(operation)) {
    receiver_concluded(self, operation, outcome);
  }
}

void happened(self_pointer self, session_unpinned& last) {
  auto& st = self->state;
  const auto found = st.sessions.find(last.transfer);
  if (found == st.sessions.end()) return;
  const auto operation = found->second.operation;
  session_ends(st, last.transfer);
  if (const auto src = st.sources.find(operation); src != st.sources.end()) {
    src->second.unpinned(last.transfer);
    release_source(self, operation);
  } else if (const auto r = st.receives.find(operation); r != st.receives.end()) {
    --r->second.live;
    release_receive(self, operation);
  }
}

// -- keyed values
// -----------------------------------------------------------------------------------------------------

void value_outcome(engine_port_state& st, value_concluded& outcome) {
  if (!st.context->operations.end(outcome.operation)) return;
  std::visit(
      [&](auto& what) {
        st.context->events.push({outcome.operation, std::move(what)});
      },
      outcome.outcome);
  tell(st.pool, pool_command{pool_changed{}});
}

void fail_value(engine_port_state& st, operation_id operation, troupe::error why) {
  value_concluded outcome{operation, {}, event_failed{std::move(why)}};
  value_outcome(st, outcome);
}

void start_client(self_pointer self, start_value order, const link_handle& link) {
  auto& st = self->state;
  const auto operation = order.operation;
  const auto transfer = new_transfer(st);
  transfer_report report;
  report.request = order.key;
  report.peer = link.peer;
  report.side = "value";
  report.state = "asked";
  auto client = self->spawn<caf::monitored>(
      value_client, value_client_options{st.context, caf::actor_cast<engine_port_actor>(self), link,
                                         transfer, std::move(order)});
  st.value_clients.emplace(operation, transfer);
  session_begins(st, operation, transfer, std::move(client), link, std::move(report),
                 now() + st.context->settings.default_deadline);
}

void carry_out(self_pointer self, start_value& order) {
  auto& st = self->state;
  if (order.peer == st.context->self.name) {
    value_concluded outcome{order.operation, {}, value_here(*st.context, order)};
    value_outcome(st, outcome);
    return;
  }
  if (const auto link = st.links.find(order.peer); link != st.links.end()) {
    start_client(self, std::move(order), link->second);
    return;
  }
  auto& waiting = st.waiting_for_link[order.peer];
  waiting.push_back(order.operation);
  const auto peer = order.peer;
  const bool first = waiting.size() == 1;
  st.values.emplace(order.operation, std::move(order));
  if (first) ask_for_link(st, peer);
}

void happened(self_pointer self, value_concluded& outcome) {
  auto& st = self->state;
  session_ends(st, outcome.transfer);
  st.value_clients.erase(outcome.operation);
  value_outcome(st, outcome);
}

void value_came(self_pointer self, const link_handle& link, session_message& message) {
  auto& st = self->state;
  if (auto reply = answer_value(*st.context, message)) {
    // Small enough for one frame, or refused: no actor needed.
    tell(link.actor, link_command{say{std::move(*reply), {}}});
    tell(st.pool, pool_command{pool_changed{}});
    return;
  }
  const auto transfer = route_of(message);
  if (st.sessions.contains(transfer)) {
    refuse_request(link, transfer, {errc::already_exists, "that operation is live here"});
    return;
  }
  transfer_report report;
  report.request = std::visit(
      []<class Message>(const Message& m) -> std::string {
        if constexpr (requires { m.key; }) {
          return m.key;
        } else {
          return {};
        }
      },
      message);
  report.peer = link.peer;
  report.side = "serve";
  report.state = "answering";
  auto server = self->spawn<caf::monitored>(
      value_server, value_server_options{st.context, caf::actor_cast<engine_port_actor>(self),
                                         st.pool, link, std::move(message)});
  // The pin of a value is its reader's for as long as that lives.
  session_begins(st, operation_id{}, transfer, std::move(server), link, std::move(report),
                 no_deadline);
}

// -- links
// --------------------------------------------------------------------------------------------------------------

void happened(self_pointer self, link_ready& ready) {
  auto& st = self->state;
  const auto peer = ready.link.peer;
  // Watched here, once, and not by each session: a link remembers whoever watches it until it ends.
  if (st.watched_links.insert(ready.link.actor.id()).second) self->monitor(ready.link.actor);
  st.links[peer] = ready.link;
  const auto found = st.waiting_for_link.find(peer);
  if (found == st.waiting_for_link.end()) return;
  const auto waiting = std::move(found->second);
  st.waiting_for_link.erase(found);
  for (const auto operation : waiting) {
    if (const auto value = st.values.find(operation); value != st.values.end()) {
      auto order = std::move(value->second);
      st.values.erase(value);
      start_client(self, std::move(order), ready.link);
      continue;
    }
    const auto r = st.receives.find(operation);
    if (r == st.receives.end() || r->second.now != receiving::phase::moving) continue;
    for (std::size_t index = 0; index < r->second.ranks.size(); ++index) {
      const auto& rank = r->second.ranks[index];
      if (rank.peer == peer && !rank.transfer) {
        start_receiver(self, operation, index, ready.link);
        break;
      }
    }
  }
}

void happened(self_pointer self, link_gone& gone) {
  auto& st = self->state;
  const incarnation life{gone.peer_incarnation};
  if (const auto link = st.links.find(gone.peer);
      link != st.links.end() && link->second.actor.id() == gone.link) {
    st.links.erase(link);
  }
  if (const auto link = st.links.find(gone.peer);
      link == st.links.end() || link->second.peer_incarnation != life) {
    st.send_geometry.erase(life);
    st.receive_geometry.erase(life);
  }
  drop_parked(st, [&](const parked_request& one) { return one.link.actor.id() == gone.link; });
  if (!gone.dialled) return;
  const auto found = st.waiting_for_link.find(gone.peer);
  if (found == st.waiting_for_link.end()) return;
  const auto waiting = std::move(found->second);
  st.waiting_for_link.erase(found);
  for (const auto operation : waiting) {
    if (st.values.erase(operation) != 0) {
      fail_value(st, operation, gone.why);
    } else if (st.receives.contains(operation)) {
      fail_receive(self, operation, gone.why);
    }
  }
}

void happened(self_pointer self, link_message& came) {
  auto& message = came.message;
  const auto& sessions = self->state.sessions;
  if (auto* request = std::get_if<transfer_request>(&message)) {
    request_came(self, came.link, std::move(*request));
  } else if (const auto session = sessions.find(route_of(message));
             session != sessions.end() && session->second.link == came.link.actor.id()) {
    // It came right behind the message that the session was spawned for, before the link knew of
    // the session.
    tell(session->second.actor, session_event{std::move(message)});
  } else if (const auto* abort = std::get_if<transfer_abort>(&message)) {
    // A request that is still parked was given up.
    const auto transfer = abort->transfer;
    drop_parked(self->state,
                [&](const parked_request& one) { return one.request.transfer == transfer; });
    tell(came.link.actor, link_command{say{transfer_quiescent{transfer}, {}}});
  } else if (std::holds_alternative<store_put>(message) ||
             std::holds_alternative<store_get>(message) ||
             std::holds_alternative<store_query>(message) ||
             std::holds_alternative<store_remove>(message)) {
    value_came(self, came.link, message);
  } else {
    // Late words of a transfer that has ended here.
    logger("port")->debug("{} from {} belongs to no transfer", type_name(message), came.link.peer);
  }
}

// -- aborts, deadlines, the end
// -------------------------------------------------------------------------------------------

void end_operation(self_pointer self, operation_id operation, troupe::error why,
                   const session_event& to_sessions) {
  auto& st = self->state;
  if (st.sources.contains(operation)) {
    conclude_source(self, operation, std::move(why), to_sessions);
  } else if (st.receives.contains(operation)) {
    conclude_receive(self, operation, std::move(why), to_sessions);
  } else if (st.values.erase(operation) != 0) {
    fail_value(st, operation, std::move(why));
  } else if (const auto client = st.value_clients.find(operation);
             client != st.value_clients.end()) {
    tell_session(st, client->second, to_sessions);
  }
}

void carry_out(self_pointer self, abort_operation& order) {
  const troupe::error why{errc::aborted, order.reason};
  end_operation(self, order.operation, why, session_event{engine_aborts{why}});
}

void carry_out(self_pointer self, wire_port& order) {
  self->state.node = std::move(order.node);
  self->state.pool = std::move(order.pool);
}

void carry_out(self_pointer self, stop_port&) {
  auto& st = self->state;
  st.stopping = true;
  const troupe::error why{errc::aborted, "the node stops"};
  const session_event to_sessions{engine_aborts{why}};
  std::vector<operation_id> live;
  for (const auto& [operation, src] : st.sources) live.push_back(operation);
  for (const auto& [operation, r] : st.receives) live.push_back(operation);
  for (const auto& [operation, value] : st.values) live.push_back(operation);
  for (const auto& [operation, client] : st.value_clients) live.push_back(operation);
  for (const auto operation : live) end_operation(self, operation, why, to_sessions);
  for (const auto& [transfer, session] : st.sessions) {
    if (session.operation == operation_id{}) tell(session.actor, to_sessions);
  }
  drop_parked(st, [&](const parked_request& one) {
    refuse_request(one.link, one.request.transfer, why);
    return true;
  });
}

void parked_too_long(engine_port_state& st, transfer_id transfer) {
  drop_parked(st, [&](const parked_request& one) {
    if (one.request.transfer != transfer) return false;
    refuse_request(one.link, transfer,
                   {errc::deadline, "no prefill engine offered request `" + one.request.request +
                                        "` here in time"});
    return true;
  });
}

void deadline_passed(self_pointer self, timer what, std::uint64_t id) {
  auto& st = self->state;
  switch (what) {
    case timer::operation: {
      const operation_id operation{id};
      const auto src = st.sources.find(operation);
      std::string sentence = "the deadline passed";
      if (src != st.sources.end() && src->second.senders().empty()) {
        sentence += " and no decode rank asked for request `" + src->second.spec().request + "`";
      }
      // A sender's own deadline is its decode rank's, which may be later: it must not wait for
      // that.
      const troupe::error why = src != st.sources.end() && src->second.lost()
                                    ? *src->second.lost()
                                    : troupe::error{errc::deadline, sentence};
      end_operation(self, operation, why, session_event{engine_aborts{why}});
      return;
    }
    case timer::session: tell_session(st, transfer_id{id}, session_event{deadline_came{}}); return;
    case timer::parked: parked_too_long(st, transfer_id{id}); return;
  }
}

void tick(self_pointer self) {
  auto& st = self->state;
  st.ticking = false;
  const auto time = now();
  while (!st.deadlines.empty() && std::get<time_point>(*st.deadlines.begin()) <= time) {
    const auto [when, what, id] = *st.deadlines.begin();
    st.deadlines.erase(st.deadlines.begin());
    deadline_passed(self, what, id);
  }
  arm(self);
}

transfer_reports describe(const engine_port_state& st) {
  transfer_reports all;
  const auto time = now();
  for (const auto& [transfer, session] : st.sessions) {
    auto report = session.report;
    report.age_ms = static_cast<std::uint32_t>(
        std::chrono::duration_cast<std::chrono::milliseconds>(time - session.started).count());
    all.transfers.push_back(std::move(report));
  }
  return all;
}

/// A link's actor ended. Sessions that it never heard of get no answer from it: it granted nothing
/// for them, so that nothing of them can move. After a crash of the link nobody knows; the pins
/// stay.
void link_ended(engine_port_state& st, caf::actor_id link, bool crashed) {
  for (const auto& [transfer, session] : st.sessions) {
    if (session.link != link) continue;
    tell(session.actor, session_event{link_is_lost{
                            {errc::peer_lost, "the link to " + session.report.peer + " is gone"}}});
    if (!crashed) tell(session.actor, session_event{transfer_is_quiescent{}});
  }
}

/// An actor of one transfer ended by a defect of ours. Its operation fails; its blocks stay pinned,
/// since nobody is left to say that nothing can touch them any more.
void session_crashed(self_pointer self, const caf::down_msg& down) {
  if (!down.reason) return;
  auto& st = self->state;
  const auto crashed = std::ranges::find_if(
      st.sessions, [&](const auto& entry) { return entry.second.actor.address() == down.source; });
  if (crashed == st.sessions.end()) return;
  const troupe::error why{errc::internal, "the actor of the transfer crashed; see the log"};
  logger("port")->error(
      "transfer {:016x} request {}: its actor crashed ({}); its blocks stay pinned",
      crashed->first.value, crashed->second.report.request, self->system().render(down.reason));
  end_operation(self, crashed->second.operation, why, session_event{engine_aborts{why}});
}

}  // namespace

engine_port_actor::behavior_type engine_port(
    engine_port_actor::stateful_pointer<engine_port_state> self, context_ptr context) {
  set_log_handlers(*self, "port");
  self->state.context = std::move(context);
  self->set_down_handler([self](const caf::down_msg& down) {
    if (self->state.watched_links.erase(down.source.id()) != 0) {
      link_ended(self->state, down.source.id(), static_cast<bool>(down.reason));
    } else {
      session_crashed(self, down);
    }
  });
  return {
      [self](engine_command& command) {
        std::visit([self](auto& order) { carry_out(self, order); }, command.what);
        arm(self);
      },
      [self](port_event& event) {
        std::visit([self](auto& what) { happened(self, what); }, event.what);
        arm(self);
      },
      [self](report_atom) { return describe(self->state); },
      [self](tick_atom) { tick(self); },
  };
}

}  // namespace troupe::actors
