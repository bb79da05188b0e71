#include <algorithm>
#include <chrono>
#include <utility>

#include <spdlog/spdlog.h>

#include "troupe/actors/decode_receiver.hpp"
#include "troupe/actors/engine_checks.hpp"
#include "troupe/actors/engine_port_parts.hpp"
#include "troupe/actors/inline_unit.hpp"
#include "troupe/actors/logging.hpp"
#include "troupe/actors/phrases.hpp"
#include "troupe/actors/placement_epochs.hpp"

namespace troupe::actors::port {

void release_receive(self_pointer self, operation_id operation) {
  auto& st = self->state;
  const auto found = st.receives.find(operation);
  if (found == st.receives.end()) return;
  const auto& r = found->second;
  if (r.now != receiving::phase::concluded || r.live != 0) return;
  if (r.pinned) {
    unpin_blocks(st, r.spec.request, blocks_written(r.spec, st.context->layout->block_tokens));
  }
  st.receives.erase(found);
  st.context->events.push_last({operation, event_unpinned{}});
}

void conclude_receive(self_pointer self, operation_id operation,
                      std::optional<troupe::error> failure, const session_event& to_receivers) {
  auto& st = self->state;
  auto& r = st.receives.at(operation);
  if (r.now == receiving::phase::concluded) return;
  // No stream is held past the outcome: nothing will come that it could wait for.
  for (const auto& stream : r.held) stream.gate->open();
  r.held.clear();
  if (r.now == receiving::phase::in_line) {
    tell(st.pool, pool_command{leave_line{operation}});
  }
  for (const auto& rank : r.ranks) {
    if (!rank.transfer) leave_link_line(st, rank.peer, operation);
  }
  r.now = receiving::phase::concluded;
  st.leases.end(operation);
  forget_deadline(st, r.deadline, timer::operation, operation.value);
  count_outcome(st, failure, r.bytes);
  if (failure) {
    tell_outcome(st, operation, event_failed{*failure});
  } else {
    tell_outcome(st, operation,
                 event_done{std::move(r.aux), r.bytes, r.moved.told(r.began, now())});
  }
  for (const auto& rank : r.ranks) {
    if (rank.transfer) tell_session(st, *rank.transfer, to_receivers);
  }
  release_receive(self, operation);
}

void fail_receive(self_pointer self, operation_id operation, troupe::error why) {
  const session_event to_receivers{engine_aborts{why}};
  conclude_receive(self, operation, std::move(why), to_receivers);
}

namespace {

bool is_complete(const receiving& r, const open_when_complete& wanted) {
  if (r.told.empty()) return wanted.token_end <= r.spec.prefix_tokens;  // nothing moves yet
  return std::all_of(r.told.begin() + wanted.layer_begin, r.told.begin() + wanted.layer_end,
                     [&](std::uint32_t tokens) { return tokens >= wanted.token_end; });
}

void let_streams_go(receiving& r) {
  std::erase_if(r.held, [&](const open_when_complete& stream) {
    if (!is_complete(r, stream)) return false;
    stream.gate->open();
    return true;
  });
}

/// Tells the engine of layers that are now complete from every rank, neighbours of equal progress
/// as one, and lets the streams go that waited for them.
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
  let_streams_go(r);
}

}  // namespace

void start_receiver(self_pointer self, operation_id operation, std::size_t index,
                    const link_handle& link) {
  auto& st = self->state;
  auto& r = st.receives.at(operation);
  auto mapping = geometry(st, link, kvcache::data_flow::to_local);
  if (!mapping) {
    fail_receive(self, operation, mapping.error());
    return;
  }
  // Of a replica of an open stage only its nodes know how many ranks it has.
  if (link.peer_layout->tp_size != r.spec.sources.size()) {
    fail_receive(self, operation,
                 {errc::layout_mismatch,
                  link.peer + " is of a replica of " + count_of(link.peer_layout->tp_size, "rank") +
                      ", the receive names " + count_of(r.spec.sources.size(), "source") +
                      "; name every rank of the replica"});
    return;
  }
  const auto life = r.spec.lives.empty() ? 0 : r.spec.lives[index];
  if (auto meant = check_life(link.peer, link.peer_incarnation.value, life); !meant) {
    fail_receive(self, operation, meant.error());
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
  request.placed_by = r.spec.placed_by;
  request.placed_at = r.spec.placed_at;
  request.life = life;
  request.expect = r.spec.expect;
  request.again = r.spec.again;
  if (r.spec.park) options.park_until = now() + std::min(*r.spec.park, longest_time);
  request.token_begin = r.spec.prefix_tokens;
  request.token_end = r.spec.tokens;
  if (!layout.states.empty()) request.state_slots = {r.spec.state_slot};
  // A rank whose heads another rank of its replica sends has nothing to tell of layers.
  const bool idle = !(*mapping)->moves_anything();
  rank.landed.assign(layout.layers.size(), idle ? r.spec.tokens : r.spec.prefix_tokens);
  auto report = report_of(r.spec.request, link, "receive", "requested");
  ++r.live;
  const auto transfer = *rank.transfer;
  const auto deadline = r.deadline;
  auto receiver = self->spawn<caf::monitored>(decode_receiver, std::move(options));
  rank.receiver = receiver;
  st.leases.meet(operation, transfer, link.peer, link.peer_incarnation, now());
  session_begins(st, operation, transfer, std::move(receiver), link, std::move(report), deadline);
  if (std::ranges::all_of(r.ranks, [](const auto& one) { return one.transfer.has_value(); })) {
    end_own_hold(self, r.spec.request);
  }
  // The others may have landed everything while this one's link was being made.
  if (idle) tell_layers_of(st, operation, r);
}

namespace {

/// Why the placement that a receive follows counts no more.
std::optional<troupe::error> void_placement(const engine_port_state& st, const receive_spec& spec) {
  const epoch_mark placed{spec.placed_by, spec.placed_at};
  if (placed.by == 0) return std::nullopt;
  const auto last = st.context->registration.last();
  auto why =
      voided_here(*st.members, st.context->self, {last.supervisor_incarnation, last.epoch}, placed);
  for (const auto& source : spec.sources) {
    if (!why) why = voided(*st.members, source, 0, placed);
  }
  return why;
}

/// The blocks are there: reach every rank of the prefill replica. Whatever was lost while it waited in
/// line is looked at once more.
void begin_moving(self_pointer self, operation_id operation) {
  auto& st = self->state;
  auto& r = st.receives.at(operation);
  if (auto why = void_placement(st, r.spec)) {
    r.now = receiving::phase::linking;
    fail_receive(self, operation, std::move(*why));
    return;
  }
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
    wait_for_link(st, peer, operation);
  }
}

}  // namespace

void carry_out(self_pointer self, start_receive& order) {
  auto& st = self->state;
  const auto operation = order.operation;
  auto& r = st.receives[operation];
  r.spec = std::move(order.spec);
  r.deadline = deadline_after(st, r.spec.deadline);
  st.deadlines.emplace(r.deadline, timer::operation, operation.value);
  if (st.stopping) {
    r.pinned = st.context->pool != nullptr && !r.spec.blocks.empty();
    fail_receive(self, operation, {errc::aborted, "the node stops"});
    return;
  }
  if (auto why = void_placement(st, r.spec)) {
    r.pinned = st.context->pool != nullptr && !r.spec.blocks.empty();
    fail_receive(self, operation, std::move(*why));
    return;
  }
  // From here on, not from the link on: it may wait in line for as long as its sources live.
  for (const auto& node : r.spec.sources)
    st.leases.hold(operation, node, now(), {r.spec.placed_by, r.spec.placed_at});
  watch_leases(st);
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

void carry_out(self_pointer self, open_when_complete& order) {
  const auto found = self->state.receives.find(order.operation);
  const bool goes_on =
      found != self->state.receives.end() && found->second.now != receiving::phase::concluded;
  if (!goes_on || is_complete(found->second, order)) {
    order.gate->open();
    return;
  }
  found->second.held.push_back(std::move(order));
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

namespace {

receiving::from_rank* rank_of(receiving& r, transfer_id transfer) {
  const auto found = std::ranges::find_if(
      r.ranks, [&](const receiving::from_rank& rank) { return rank.transfer == transfer; });
  return found == r.ranks.end() ? nullptr : &*found;
}

}  // namespace

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
  const bool first = rank == &r.ranks.front();
  if (first) r.moved.backend = outcome.moved.backend;
  r.moved.add(outcome.moved);
  if (!outcome.aux.empty() && (first || r.aux.empty())) r.aux = std::move(outcome.aux);
  if (std::ranges::all_of(r.ranks, &receiving::from_rank::done)) {
    conclude_receive(self, operation, std::nullopt, {receive_is_whole{}});
  }
}

}  // namespace troupe::actors::port
