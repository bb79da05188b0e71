#include <algorithm>
#include <chrono>
#include <utility>

#include <spdlog/spdlog.h>

#include "troupe/actors/base/phrases.hpp"
#include "troupe/actors/context/decode_receiver.hpp"
#include "troupe/actors/context/engine_checks.hpp"
#include "troupe/actors/logging.hpp"
#include "troupe/actors/membership/placement_epochs.hpp"
#include "troupe/actors/operations/request_tables.hpp"
#include "troupe/actors/runner/operation_runner.hpp"
#include "troupe/kvcache/layer_parts.hpp"

namespace troupe::actors::operations {

namespace {

bool is_complete(const receive_operation& r, const open_when_complete& wanted) {
  if (r.reported.empty()) return wanted.token_end <= r.spec.prefix_tokens;  // nothing moves yet
  return std::all_of(r.reported.begin() + wanted.layer_begin, r.reported.begin() + wanted.layer_end,
                     [&](std::uint32_t tokens) { return tokens >= wanted.token_end; });
}

void let_streams_go(receive_operation& r) {
  std::erase_if(r.gates, [&](const open_when_complete& stream) {
    if (!is_complete(r, stream)) return false;
    stream.gate->open();
    return true;
  });
}

/// How far each layer has landed at the start: complete for layers that the source does not hold or
/// sends nothing of.
std::vector<std::uint32_t> landed_at_first(const receive_spec& spec, std::size_t layers,
                                           const kvcache::transfer_geometry& geometry) {
  std::vector<std::uint32_t> landed(layers, spec.tokens);
  if (geometry.moves_anything()) {
    std::fill_n(landed.begin() + geometry.first_local_layer(), geometry.layers(),
                spec.prefix_tokens);
  }
  return landed;
}

/// For a replica that is not divided into parts: whether all its ranks are named. Only the nodes of
/// an open stage know how many ranks its replicas have.
result<void> check_count(const link_handle& link, const receive_spec& spec) {
  if (kvcache::is_part(*link.peer_layout)) return {};  // parts are checked together
  if (link.peer_layout->tp_size == spec.sources.size()) return {};
  return fail(errc::layout_mismatch,
              link.peer + " is of a replica of " + count_of(link.peer_layout->tp_size, "rank") +
                  ", the receive names " + count_of(spec.sources.size(), "source") +
                  "; name every rank of the replica");
}

/// The incarnation that is meant for that source; 0: any.
std::uint64_t life_meant(const receive_spec& spec, std::size_t index) {
  return spec.lives.empty() ? 0 : spec.lives[index];
}

result<void> check_meant(const receive_spec& spec, std::size_t index, const link_handle& link) {
  return check_life(link.peer, link.peer_incarnation.value, life_meant(spec, index));
}

receive_operation::from_rank* rank_of(receive_operation& r, transfer_id transfer) {
  const auto found = std::ranges::find_if(
      r.ranks, [&](const receive_operation::from_rank& rank) { return rank.transfer == transfer; });
  return found == r.ranks.end() ? nullptr : &*found;
}

}  // namespace

void operation_runner::release_receive(operation_id operation) {
  const auto found = receives_.find(operation);
  if (found == receives_.end()) return;
  const auto& r = found->second;
  if (r.state != receive_operation::phase::concluded || r.live != 0) return;
  if (r.pinned) {
    unpin_blocks(r.spec.request, blocks_written(r.spec, context_->layout->block_tokens));
  }
  receives_.erase(found);
  context_->events.push_last({operation, event_unpinned{}});
}

void operation_runner::conclude_receive(operation_id operation,
                                        std::optional<troupe::error> failure,
                                        const session_event& to_receivers) {
  auto& r = receives_.at(operation);
  if (r.state == receive_operation::phase::concluded) return;
  // No stream is held past the outcome: nothing more will come for it.
  for (const auto& stream : r.gates) stream.gate->open();
  r.gates.clear();
  if (r.state == receive_operation::phase::in_line) {
    around_.tell_pool(pool_command{leave_line{operation}});
  }
  for (const auto& rank : r.ranks) {
    if (!rank.transfer) leave_link_line(rank.peer, operation);
  }
  r.state = receive_operation::phase::concluded;
  leases_.end(operation);
  forget_deadline(r.deadline, timer::operation, operation.value);
  count_outcome(failure, r.bytes);
  if (failure) {
    tell_outcome(operation, event_failed{*failure});
  } else {
    tell_outcome(operation,
                 event_done{std::move(r.aux), r.bytes, r.moved.told(r.began, around_.now())});
  }
  for (const auto& rank : r.ranks) {
    if (rank.transfer) tell_session(*rank.transfer, to_receivers);
  }
  release_receive(operation);
}

void operation_runner::fail_receive(operation_id operation, troupe::error why) {
  const session_event to_receivers{abort_session{why}};
  conclude_receive(operation, std::move(why), to_receivers);
}

/// Tells the engine which layers are now complete from every rank, merging neighbours of equal
/// progress, and releases the streams that waited for them.
void operation_runner::tell_layers_of(operation_id operation, receive_operation& r) {
  const auto layers = static_cast<std::uint32_t>(r.reported.size());
  std::vector<std::uint32_t> complete(layers, r.spec.tokens);
  for (const auto& rank : r.ranks) {
    for (std::uint32_t layer = 0; layer < layers; ++layer) {
      const auto landed = rank.transfer ? rank.landed[layer] : r.spec.prefix_tokens;
      complete[layer] = std::min(complete[layer], landed);
    }
  }
  for (std::uint32_t begin = 0; begin < layers;) {
    auto end = begin + 1;
    while (end < layers && complete[end] == complete[begin] && r.reported[end] == r.reported[begin])
      ++end;
    if (complete[begin] > r.reported[begin]) {
      context_->events.push(
          {operation, event_layers{{begin, end, r.reported[begin], complete[begin]}}});
      std::fill(r.reported.begin() + begin, r.reported.begin() + end, complete[begin]);
    }
    begin = end;
  }
  let_streams_go(r);
}

void operation_runner::start_receiver(operation_id operation, std::size_t index,
                                      const link_handle& link) {
  auto& r = receives_.at(operation);
  auto mapping = geometry(link, kvcache::data_flow::to_local);
  if (!mapping) {
    fail_receive(operation, mapping.error());
    return;
  }
  if (auto all = check_count(link, r.spec); !all) {
    fail_receive(operation, all.error());
    return;
  }
  if (auto meant = check_meant(r.spec, index, link); !meant) {
    fail_receive(operation, meant.error());
    return;
  }
  auto& rank = r.ranks[index];
  rank.transfer = new_transfer();
  const auto& layout = *context_->layout;
  decode_receiver_options options;
  options.basis.context = context_;
  options.basis.started = around_.now();
  options.basis.link = link;
  options.basis.geometry = *mapping;
  options.basis.transfer = *rank.transfer;
  options.basis.request = r.spec.request;
  options.basis.local = tables_of(layout, r.spec.blocks, r.spec.groups);
  options.basis.kept = kept_of(r.spec.groups, **mapping, r.spec.tokens);
  options.basis.local_state_slot = r.spec.state_slot;
  options.deadline = r.deadline;
  auto& request = options.request;
  request.transfer = *rank.transfer;
  request.request = r.spec.request;
  request.mode = r.spec.mode;
  request.rank = context_->self.rank;
  request.ranks = context_->self.ranks;
  request.placed_by = r.spec.placed_by;
  request.placed_at = r.spec.placed_at;
  request.life = life_meant(r.spec, index);
  request.expect = r.spec.expect;
  request.again = r.spec.again;
  if (r.spec.park) options.park_until = around_.now() + std::min(*r.spec.park, longest_time);
  request.token_begin = r.spec.prefix_tokens;
  request.token_end = r.spec.tokens;
  if (!layout.states.empty()) request.state_slots = {r.spec.state_slot};
  rank.landed = landed_at_first(r.spec, layout.layers.size(), **mapping);
  auto report = report_of(r.spec.request, link, "receive", "requested");
  ++r.live;
  const auto transfer = *rank.transfer;
  const auto deadline = r.deadline;
  auto receiver =
      around_.begin_session(transfer, link, std::make_unique<decode_receiver>(std::move(options)));
  leases_.meet(operation, transfer, link.peer, link.peer_incarnation, around_.now());
  session_begins(operation, transfer, std::move(receiver), link, std::move(report), deadline);
  if (std::ranges::all_of(r.ranks, [](const auto& one) { return one.transfer.has_value(); })) {
    end_own_hold(r.spec.request);
  }
}

/// Whether the sources whose links are up may start. Sources that hold parts of a model wait for
/// each other: only all their layouts together tell whether they are complete, and a missing part
/// must be reported before a byte moves. An error of one source is reported at once.
result<bool> operation_runner::may_start(const receive_operation& r) {
  std::vector<const link_handle*> up;
  for (const auto& rank : r.ranks) {
    const auto link = links_.find(rank.peer);
    up.push_back(link != links_.end() ? &link->second : nullptr);
  }
  const bool divided = std::ranges::any_of(up, [](const link_handle* link) {
    return link != nullptr && link->peer_layout && kvcache::is_part(*link->peer_layout);
  });
  if (!divided) return true;
  std::vector<kvcache::source_layout> layouts;
  for (std::size_t index = 0; index < up.size(); ++index) {
    if (up[index] == nullptr) continue;
    if (auto maps = geometry(*up[index], kvcache::data_flow::to_local); !maps) {
      return fail(maps.error());
    }
    if (auto meant = check_meant(r.spec, index, *up[index]); !meant) return fail(meant.error());
    layouts.push_back({r.ranks[index].peer, up[index]->peer_layout.get()});
  }
  if (layouts.size() < up.size()) return false;
  if (auto whole = kvcache::check_covers(*context_->layout, layouts); !whole) {
    return fail(whole.error());
  }
  return true;
}

/// Why the placement that a receive follows is void. Empty if it is valid.
std::optional<troupe::error> operation_runner::void_placement(const receive_spec& spec) const {
  const membership_mark placed{spec.placed_by, spec.placed_at};
  if (placed.by == 0) return std::nullopt;
  const auto last = context_->registration.last();
  auto why = check_own_placement(*members_, context_->self,
                                 {last.supervisor_incarnation, last.epoch}, placed);
  for (const auto& source : spec.sources) {
    if (!why) why = check_placement(*members_, source, 0, placed);
  }
  return why;
}

/// The blocks are allocated: reaches out to every rank of the prefill replica. Checks again for
/// losses while it waited in line.
void operation_runner::begin_moving(operation_id operation) {
  auto& r = receives_.at(operation);
  if (auto why = void_placement(r.spec)) {
    r.state = receive_operation::phase::linking;
    fail_receive(operation, std::move(*why));
    return;
  }
  r.state = receive_operation::phase::moving;
  r.reported.assign(context_->layout->layers.size(), r.spec.prefix_tokens);
  for (std::size_t index = 0; index < r.spec.sources.size(); ++index) {
    const auto& peer = r.spec.sources[index];
    r.ranks.push_back({peer, std::nullopt, false, {}});
  }
  start_receivers(operation);
}

void operation_runner::start_receivers(operation_id operation) {
  const auto going_on = [&]() -> receive_operation* {
    const auto found = receives_.find(operation);
    const bool moves =
        found != receives_.end() && found->second.state == receive_operation::phase::moving;
    return moves ? &found->second : nullptr;
  };
  auto* r = going_on();
  if (r == nullptr) return;
  const auto start = may_start(*r);
  if (!start) {
    fail_receive(operation, start.error());
    return;
  }
  // The first source that cannot start ends the whole receive.
  for (std::size_t index = 0; (r = going_on()) != nullptr && index < r->ranks.size(); ++index) {
    const auto& rank = r->ranks[index];
    if (rank.transfer) continue;
    const auto link = links_.find(rank.peer);
    if (link == links_.end()) {
      wait_for_link(rank.peer, operation);
    } else if (*start) {
      start_receiver(operation, index, link->second);
    }
  }
  // Other sources may have landed these layers already while the links were being made.
  if (r != nullptr) tell_layers_of(operation, *r);
}

void operation_runner::on_start_receive(start_receive& order) {
  const auto operation = order.operation;
  auto& r = receives_[operation];
  r.began = around_.now();
  r.spec = std::move(order.spec);
  r.deadline = deadline_after(r.spec.deadline);
  deadlines_.emplace(r.deadline, timer::operation, operation.value);
  if (stopping_) {
    r.pinned = context_->pool != nullptr && !r.spec.blocks.empty();
    fail_receive(operation, {errc::aborted, "the node stops"});
    return;
  }
  if (auto why = void_placement(r.spec)) {
    r.pinned = context_->pool != nullptr && !r.spec.blocks.empty();
    fail_receive(operation, std::move(*why));
    return;
  }
  // Held from here on, not from the link on: it may wait in line for as long as its sources live.
  for (const auto& node : r.spec.sources)
    leases_.hold(operation, node, around_.now(), {r.spec.placed_by, r.spec.placed_at});
  watch_leases();
  const auto block_tokens = context_->layout->block_tokens;
  const auto needed = (r.spec.tokens + block_tokens - 1) / block_tokens;
  if (!r.spec.blocks.empty() || !r.spec.groups.empty() || needed == 0) {
    r.pinned = context_->pool != nullptr && !r.spec.blocks.empty();
    begin_moving(operation);
    return;
  }
  r.state = receive_operation::phase::in_line;
  if (!r.spec.fail_when_full) {
    around_.tell_pool(pool_command{wait_for_blocks{operation, needed, r.deadline}});
    return;
  }
  auto blocks = context_->pool
                    ? context_->pool->allocate(needed)
                    : result<kvcache::allocation>{
                          fail(errc::invalid_config,
                               "this node has no pool of its own; name the destination blocks")};
  around_.tell_itself({blocks_granted{operation, std::move(blocks)}});
}

void operation_runner::on_open_when_complete(open_when_complete& order) {
  const auto found = receives_.find(order.operation);
  const bool goes_on =
      found != receives_.end() && found->second.state != receive_operation::phase::concluded;
  if (!goes_on || is_complete(found->second, order)) {
    order.gate->open();
    return;
  }
  found->second.gates.push_back(std::move(order));
}

void operation_runner::on_blocks_granted(blocks_granted& granted) {
  const auto found = receives_.find(granted.operation);
  const bool wanted =
      found != receives_.end() && found->second.state == receive_operation::phase::in_line;
  if (!wanted) {
    if (granted.blocks) (void)context_->pool->free(granted.blocks->owner, granted.blocks->blocks);
    return;
  }
  auto& r = found->second;
  if (!granted.blocks) {
    r.state = receive_operation::phase::linking;
    fail_receive(granted.operation, granted.blocks.error());
    return;
  }
  r.spec.blocks = granted.blocks->blocks;
  if (auto pinned = context_->pool->pin(r.spec.blocks); !pinned) {
    r.state = receive_operation::phase::linking;
    fail_receive(granted.operation, pinned.error());
    return;
  }
  r.pinned = true;
  context_->events.push({granted.operation, event_allocated{std::move(*granted.blocks)}});
  begin_moving(granted.operation);
}

void operation_runner::on_session_layers(session_layers& layers) {
  const auto session = sessions_.find(layers.transfer);
  if (session == sessions_.end()) return;
  const auto operation = session->second.operation;
  const auto found = receives_.find(operation);
  if (found == receives_.end() || found->second.state == receive_operation::phase::concluded)
    return;
  auto* rank = rank_of(found->second, layers.transfer);
  if (rank == nullptr) return;
  session->second.report.state = "receiving";
  const auto& slice = layers.slice;
  for (auto layer = slice.layer_begin; layer < slice.layer_end && layer < rank->landed.size();
       ++layer) {
    rank->landed[layer] = std::max(rank->landed[layer], slice.token_end);
  }
  tell_layers_of(operation, found->second);
}

void operation_runner::receiver_concluded(operation_id operation, session_concluded& outcome) {
  auto& r = receives_.at(operation);
  if (r.state == receive_operation::phase::concluded) return;
  if (outcome.failure) {
    const session_event to_others{abort_session{*outcome.failure, outcome.refused}};
    conclude_receive(operation, std::move(outcome.failure), to_others);
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
  if (std::ranges::all_of(r.ranks, &receive_operation::from_rank::done)) {
    conclude_receive(operation, std::nullopt, {receive_is_whole{}});
  }
}

}  // namespace troupe::actors::operations
