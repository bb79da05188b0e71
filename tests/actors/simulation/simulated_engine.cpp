#include "simulated_engine.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "troupe/actors/context/engine_checks.hpp"
#include "troupe/kvcache/layout.hpp"

namespace troupe::actors::engine_simulation {

namespace {

constexpr std::uint32_t block_tokens = 4, nobody = UINT32_MAX, first_slot = 1U << 16U;
constexpr std::uint32_t state_layer = UINT32_MAX;
constexpr std::uint32_t slots = 12;
/// How long after its deadline an operation has its outcome in a process that is awake, and how
/// long after that its last event comes at most.
constexpr milliseconds late{100}, longest_fence{30'000};

/// What byte `i` of a piece holds after that attempt has computed it.
std::byte content(const std::string& request, std::uint32_t attempt, std::uint32_t layer,
                  std::uint32_t plane, std::uint32_t token, std::uint32_t head, std::uint64_t i) {
  std::uint64_t all = std::hash<std::string>{}(request) + attempt;
  for (const std::uint64_t one :
       {std::uint64_t{layer}, std::uint64_t{plane}, std::uint64_t{token}, std::uint64_t{head}, i}) {
    all = (all ^ one) * 0x9E3779B97F4A7C15U;
    all ^= all >> 29U;
  }
  return static_cast<std::byte>(all >> 17U);
}

/// The states of the model: each belongs to one half of its layers.
const std::array<kvcache::cache_shape::state, 2> states{
    {{"first.conv", 24, kvcache::state_sharding::replicated},
     {"last.conv", 16, kvcache::state_sharding::sliced}}};

}  // namespace

std::vector<std::byte> simulated_engine::aux_of(std::uint32_t attempt) {
  return {static_cast<std::byte>(attempt & 0xFFU), static_cast<std::byte>(attempt >> 8U)};
}

void simulated_engine::furnish(engine_node& at, const division& how, std::uint64_t seed,
                               dice& chance) {
  // The model is the same at all nodes; how each keeps it is its own affair.
  const auto model = dice{seed}.next();
  const auto layers = static_cast<std::uint32_t>(2 + model % 3), half = layers / 2;
  const auto rank = at.context->self.rank;
  const bool last = rank + 1 == how.ranks;
  kvcache::cache_shape shape;
  auto here = layers;
  if (how.parts) {
    here = last ? layers - half : half;
    shape.first_layer = last ? half : 0;
    shape.total_layers = layers;
  } else {
    shape.tp_rank = rank;
    shape.tp_size = how.ranks;
  }
  shape.layers = kvcache::attention_layers(here, model / 3 % 4 == 0 ? 1 : 2, 4);
  shape.dtype = "int8";
  shape.block_tokens = block_tokens;
  shape.blocks = 12 + chance.upto(52);
  if (model / 12 % 3 == 0) {
    for (const auto& one : states) {
      if (how.parts && (&one == &states.back()) != last) continue;
      shape.states.push_back(one);
      if (one.sharding == kvcache::state_sharding::sliced)
        shape.states.back().bytes /= shape.tp_size;
    }
    shape.state_slots = slots;
  }
  kvcache::arrangement lies;
  if (chance.one_in(2)) {
    lies.regions = kvcache::region_use::per_layer;
  } else if (chance.one_in(2)) {
    lies.order = kvcache::block_order::blocks_first;
  }
  if (chance.one_in(2)) lies.inner = kvcache::block_inner::head_major;
  if (chance.one_in(2)) lies.kv = kvcache::kv_placement::separate;
  auto layout = *kvcache::make_layout(shape, lies);
  for (auto& layer : layout.layers) {
    for (auto& plane : layer.planes) {
      if (plane.region == 0) plane.base += simulated_values::room_before_blocks;
    }
  }
  for (auto& state : layout.states) {
    if (state.region == 0) state.base += simulated_values::room_before_blocks;
  }
  auto& context = *at.context;
  std::uint32_t number = 0;
  for (const auto size : kvcache::region_sizes(layout)) {
    at.memory.emplace_back(std::max<std::uint64_t>(size, 1));
    for (auto& byte : at.memory.back()) byte = static_cast<std::byte>(chance.next());
    context.regions.push_back(region_id{++number});
  }
  context.encoded_layout = kvcache::encode(layout);
  context.table_pools = kvcache::pools_of_tables(layout);
  context.pool = std::make_unique<cache_pool>(layout.blocks);
  context.layout = std::make_shared<const kvcache::cache_layout>(std::move(layout));
  simulated_values::furnish(at, chance);
}

simulated_engine::simulated_engine(engine_node& at, engine_ledger& in)
    : at_{at},
      ledger_{in},
      layout_{*at.context->layout},
      shadow_{at.memory},
      values_{at, in.values, [this](std::uint64_t end) {
                adopt({0, 0, end, 0, 0, 0, 0});
              }} {
  const auto& self = at_.context->self;
  if (self.stage == "prefill") ledger_.sent_since[self.rank].clear();
  for (const auto& region : shadow_) place_of_.emplace_back(region.size(), nobody);
  const auto marks = [&](std::size_t region, std::uint64_t offset, std::uint64_t length,
                         std::uint32_t place) {
    std::fill_n(place_of_[region].begin() + static_cast<std::ptrdiff_t>(offset), length, place);
  };
  for (std::uint32_t layer = 0; layer < layout_.layers.size(); ++layer) {
    const auto& planes = layout_.layers[layer].planes;
    const auto first =
        kvcache::head_range(layout_.layers[layer].shape.kv_heads, layout_.tp_size, layout_.tp_rank)
            .begin;
    for (std::uint32_t plane = 0; plane < planes.size(); ++plane) {
      const auto& at_plane = planes[plane];
      for (std::uint32_t head = 0; head < at_plane.heads; ++head) {
        pieces_.push_back(
            {at_plane.region, 0, at_plane.head_bytes, layer, plane, first + head, head});
        for (std::uint32_t block = 0; block < layout_.blocks; ++block) {
          for (std::uint32_t token = 0; token < block_tokens; ++token) {
            marks(at_plane.region, at_plane.offset_of(block_id{block}, token, head),
                  at_plane.head_bytes, block);
          }
        }
      }
    }
  }
  for (const auto& state : layout_.states) {
    for (std::uint32_t slot = 0; slot < state.slots; ++slot) {
      marks(state.region, state.base + slot * state.slot_stride, state.slot_bytes,
            first_slot + slot);
      free_slots_.insert(slot);
    }
  }
}

// -- bytes

void simulated_engine::each_piece(
    const operation& of, std::uint32_t token_begin, std::uint32_t token_end,
    const std::function<void(const piece&, std::uint32_t)>& what) const {
  for (auto where : pieces_) {
    const auto& plane = layout_.layers[where.layer].planes[where.plane];
    for (auto token = token_begin; token < token_end; ++token) {
      where.offset = plane.offset_of(of.blocks.at(token / block_tokens), token % block_tokens,
                                     where.local_head);
      what(where, token);
    }
  }
}

void simulated_engine::each_state(const operation& of,
                                  const std::function<void(const piece&)>& what) const {
  if (!of.slot) return;
  for (std::uint32_t i = 0; i < layout_.states.size(); ++i) {
    const auto& state = layout_.states[i];
    const bool sliced = state.sharding == kvcache::state_sharding::sliced;
    const auto number = state.name == states.front().name ? 0U : 1U;
    const auto size = static_cast<std::uint32_t>(state.slot_bytes);
    const auto first = sliced ? layout_.tp_rank * size : 0;
    // Each half of a sliced one may come from a rank of its own.
    const auto length = sliced ? static_cast<std::uint32_t>(states.back().bytes / 2) : size;
    for (std::uint32_t at = 0; at < size; at += length) {
      what({state.region, state.base + *of.slot * state.slot_stride + at, length, state_layer,
            number, first + at});
    }
  }
}

std::byte simulated_engine::belongs(const operation& of, std::uint32_t attempt, const piece& where,
                                    std::uint32_t token, std::uint64_t i) const {
  if (where.layer == state_layer) {
    return content(of.request, attempt, state_layer, where.plane, 0, 0, where.head + i);
  }
  return content(of.request, attempt, layout_.first_layer + where.layer, where.plane, token,
                 where.head, i);
}

void simulated_engine::write(const operation& of, const piece& where, std::uint32_t token) {
  for (std::uint64_t i = 0; i < where.length; ++i) {
    at_.memory[where.region][where.offset + i] = belongs(of, of.attempt, where, token, i);
  }
  adopt(where);
}

bool simulated_engine::holds(const operation& of, std::uint32_t attempt, const piece& where,
                             std::uint32_t token) const {
  for (std::uint64_t i = 0; i < where.length; ++i) {
    const auto there = at_.memory[where.region][where.offset + i];
    if (there != belongs(of, attempt, where, token, i)) return false;
  }
  return true;
}

bool simulated_engine::unchanged(const piece& where) const {
  return std::memcmp(at_.memory[where.region].data() + where.offset,
                     shadow_[where.region].data() + where.offset, where.length) == 0;
}

/// What is there now is what belongs there.
void simulated_engine::adopt(const piece& where) {
  std::memcpy(shadow_[where.region].data() + where.offset,
              at_.memory[where.region].data() + where.offset, where.length);
}

void simulated_engine::scribble(const operation& of) {
  const auto over = [this](const piece& where) {
    auto* bytes = at_.memory[where.region].data() + where.offset;
    for (std::uint64_t i = 0; i < where.length; ++i) bytes[i] ^= static_cast<std::byte>(0xA5U + i);
    adopt(where);
  };
  const auto first = of.kind == operation_kind::receive ? of.prefix / block_tokens : 0;
  each_piece(of, first * block_tokens, static_cast<std::uint32_t>(of.blocks.size()) * block_tokens,
             [&](const piece& where, std::uint32_t) { over(where); });
  each_state(of, over);
}

void simulated_engine::check_memory() const {
  if (at_.memory != shadow_) ledger_.violate("memory of " + at_.name + " changed that is nobody's");
}

// -- who uses what

/// From here on the network may touch these blocks of the operation.
void simulated_engine::opens(operation_id id, const operation& of,
                             std::span<const block_id> blocks) {
  for (const auto block : blocks) {
    if (!user_of_.emplace(block.value, id).second) {
      wrong(of, "gets a block that the network may still touch for another operation");
    }
  }
}

void simulated_engine::closes(operation_id id) {
  std::erase_if(user_of_, [id](const auto& one) { return one.second == id; });
  std::erase_if(operation_of_, [id](const auto& one) { return one.second == id; });
}

void simulated_engine::touched(transfer_id transfer, const link_simulation::touch& what) {
  auto& whose = ledger_.between[transfer].at(what.written ? 1 : 0);
  if (whose == 0) whose = at_.incarnation;
  if (whose != at_.incarnation) {
    return ledger_.violate("transfer " + std::to_string(transfer.value) +
                           " touches memory of another rank, " + at_.name);
  }
  if (values_.lie_at(what)) return values_.touched(transfer, what);
  for (auto at = what.offset; at < what.offset + what.length; ++at) {
    const auto user = user_of_.find(place_of_[what.region][at]);
    const auto told = (what.written ? " writes" : " reads") + std::string{" memory of "} + at_.name;
    if (user == user_of_.end()) {
      return ledger_.violate("transfer " + std::to_string(transfer.value) + told +
                             " that is not open to anybody");
    }
    const auto& of = open_.at(user->second);
    if (what.written != (of.kind == operation_kind::receive)) return wrong(of, told);
    const auto mine = operation_of_.emplace(transfer, user->second).first;
    if (mine->second != user->second) return wrong(of, "has its blocks touched for another");
  }
}

void simulated_engine::give_back(operation& of) {
  if (of.kind != operation_kind::send && of.kind != operation_kind::receive) return;
  if (std::exchange(of.freed, true) || of.mine.blocks.empty()) return;
  if (auto freed = at_.context->pool->free(of.mine.owner, of.mine.blocks); !freed) {
    wrong(of, "cannot give its blocks back: " + to_string(freed.error()));
  }
}

std::optional<std::uint32_t> simulated_engine::take_slot() {
  if (free_slots_.empty()) return std::nullopt;
  return free_slots_.extract(free_slots_.begin()).value();
}

std::uint32_t simulated_engine::rounded(std::uint32_t tokens) const {
  return (tokens + block_tokens - 1) / block_tokens;
}

// -- operations

operation_id simulated_engine::begins(operation_id id, operation what, milliseconds deadline) {
  const auto given = deadline.count() > 0 ? deadline : at_.context->settings.default_deadline;
  what.began = at_.now();
  what.due = what.began + given;
  if (what.kind == operation_kind::send) {
    ledger_.sent_since[at_.context->self.rank][what.request] = what.began;
  }
  const auto& of = open_.emplace(id, std::move(what)).first->second;
  if (of.slot) user_of_.emplace(first_slot + *of.slot, id);
  opens(id, of,
        std::span{of.blocks}
            .first(of.blocks.size() - of.later.size())
            .subspan(of.prefix / block_tokens));
  ledger_.note(at_.name + ": operation " + std::to_string(id.value) + " begins, request " +
               of.request);
  if (of.kind == operation_kind::hold) return id;
  at_.behind_orders([this, id, given] {
    const auto found = open_.find(id);
    if (found != open_.end() && !found->second.concluded) found->second.due = at_.now() + given;
  });
  watch(id);
  return id;
}

bool simulated_engine::overdue(moment since) const {
  return at_.now() > std::max(since, at_.frozen_until + milliseconds{500}) + late;
}

/// Looks whether it ends in time, now and then until it has.
void simulated_engine::watch(operation_id id) {
  const auto found = open_.find(id);
  if (found == open_.end() || !at_.alive) return;
  const auto& of = found->second;
  if (overdue(of.due)) {
    return wrong(of, of.concluded ? "is never told its last event" : "has no outcome in time");
  }
  at_.world().transports().time.after(milliseconds{250}, [this, id, weak = at_.weak_from_this()] {
    if (const auto lives = weak.lock(); lives && lives->alive) watch(id);
  });
}

std::optional<operation_id> simulated_engine::send(const std::string& request,
                                                   std::uint32_t attempt, std::uint32_t tokens,
                                                   send_spec terms, bool grows) {
  auto& context = *at_.context;
  const bool has_state = !layout_.states.empty();
  if (stopped_ || (has_state && free_slots_.empty())) return std::nullopt;
  auto blocks = context.pool->allocate(rounded(tokens));
  if (!blocks) return std::nullopt;
  operation of{.kind = operation_kind::send, .request = request, .tokens = tokens};
  of.attempt = attempt;
  of.held_for = terms.held_for.size();
  of.mine = *blocks;
  of.blocks = blocks->blocks;
  terms.request = request;
  terms.blocks = blocks->blocks;
  terms.grows = grows && terms.blocks.size() > 1;
  if (terms.grows) {
    of.later.assign(terms.blocks.begin() + 1, terms.blocks.end());
    terms.blocks.resize(1);
  }
  if (has_state) of.slot = take_slot();
  terms.state_slot = of.slot.value_or(0);
  of.computed.assign(layout_.layers.size(), 0);
  of.early = at_.draw() % 4 == 0;
  const auto room = std::uint64_t{terms.blocks.size()} * block_tokens;
  auto id = context.pool->pin(terms.blocks)
                ? context.operations.begin({operation_kind::send, request,
                                            operation_table::room_of(room), false, terms.grows})
                : result<operation_id>{fail(errc::internal, "an allocated block is not pinned")};
  if (!id) {
    (void)context.pool->unpin(terms.blocks);
    (void)context.pool->free(blocks->owner, blocks->blocks);
    if (of.slot) free_slots_.insert(*of.slot);
    return std::nullopt;
  }
  auto& attempts = ledger_.requests[request].attempts;
  attempts = std::max(attempts, attempt);
  const auto deadline = terms.deadline;
  const auto given = deadline.count() > 0 ? deadline : context.settings.default_deadline;
  of.may_fail = at_.now() + std::min(given, ledger_.retry_window);
  at_.order(engine_command{start_send{*id, std::move(terms)}});
  return begins(*id, std::move(of), deadline);
}

bool simulated_engine::compute(operation_id send, std::uint32_t seal_at) {
  const auto found = open_.find(send);
  if (found == open_.end() || found->second.sealed || found->second.concluded || stopped_) {
    return false;
  }
  auto& of = found->second;
  auto& operations = at_.context->operations;
  if (!of.later.empty()) {
    if (!operations.grow(send, 0) || !at_.context->pool->pin(of.later)) return false;
    opens(send, of, of.later);
    const auto tokens = of.later.size() * block_tokens;
    const auto added = of.later;
    at_.order(engine_command{send_grew{send, {std::exchange(of.later, {}), 0}}});
    at_.behind_orders([this, send, added] {
      // A send that has ended meanwhile takes no more blocks: they go back to the pool at once.
      if (at_.context->operations.find(send)) return;
      for (const auto block : added) {
        const auto user = user_of_.find(block.value);
        if (user != user_of_.end() && user->second == send) user_of_.erase(user);
      }
    });
    return operations.grow(send, tokens).has_value();
  }
  const auto least = std::ranges::min_element(of.computed);
  const auto layer = static_cast<std::uint32_t>(least - of.computed.begin());
  const bool seals = *least >= of.tokens || at_.draw() % 6 == 0;
  const auto token_end =
      seals ? of.tokens
            : std::min(of.tokens, *least + 1 + static_cast<std::uint32_t>(at_.draw() % 8));
  each_piece(of, 0, token_end, [&](const piece& where, std::uint32_t token) {
    const bool now = seals || where.layer == layer;
    if (now && token >= of.computed[where.layer]) write(of, where, token);
  });
  if (!seals) {
    *least = token_end;
    at_.order(engine_command{send_progress{send, {layer, layer + 1, token_end}}});
    return true;
  }
  each_state(of, [&](const piece& where) { write(of, where, 0); });
  if (!operations.seal(send)) return false;
  of.sealed = true;
  at_.order(engine_command{send_sealed{send, {std::min(seal_at, of.tokens), aux_of(of.attempt)}}});
  return false;
}

std::optional<operation_id> simulated_engine::receive(receive_spec terms, std::uint32_t attempt,
                                                      bool own) {
  auto& context = *at_.context;
  const bool has_state = !layout_.states.empty();
  if (stopped_ || (has_state && free_slots_.empty())) return std::nullopt;
  operation of{.kind = operation_kind::receive, .request = terms.request, .tokens = terms.tokens};
  of.mode = terms.mode;
  of.attempt = attempt;
  of.early = at_.draw() % 4 == 0;
  if (own) {
    auto blocks = context.pool->allocate(rounded(terms.tokens));
    if (!blocks) return std::nullopt;
    of.mine = *blocks;
    of.blocks = terms.blocks = blocks->blocks;
    of.prefix = terms.prefix_tokens;
  } else {
    terms.prefix_tokens = 0;
  }
  if (has_state) of.slot = take_slot();
  terms.state_slot = of.slot.value_or(0);
  const auto refuse = [&] {
    if (own) (void)context.pool->free(of.mine.owner, of.mine.blocks);
    if (of.slot) free_slots_.insert(*of.slot);
    return std::optional<operation_id>{};
  };
  if (!check_receive(context, terms) || !context.pool->pin(terms.blocks)) return refuse();
  auto id = context.operations.begin({operation_kind::receive, terms.request, terms.tokens, false});
  if (!id) {
    (void)context.pool->unpin(terms.blocks);
    return refuse();
  }
  const auto written = blocks_written(terms, block_tokens).size();
  (void)context.pool->unpin(std::span{terms.blocks}.first(terms.blocks.size() - written));
  ledger_.totals.again += terms.again ? 1 : 0;
  ledger_.totals.in_line += own ? 0 : 1;
  const auto deadline = terms.deadline;
  at_.order(engine_command{start_receive{*id, std::move(terms)}});
  return begins(*id, std::move(of), deadline);
}

std::optional<operation_id> simulated_engine::word(source_verb verb, const std::string& request) {
  if (stopped_) return std::nullopt;
  const bool holds = verb == source_verb::hold;
  operation of{.kind = holds ? operation_kind::hold : operation_kind::release, .request = request};
  if (!check_words(*at_.context, request, ledger_.sources, {})) return std::nullopt;
  auto id = at_.context->operations.begin({of.kind, holds ? request : "", 0, false});
  if (!id) return std::nullopt;
  at_.order(engine_command{start_word{*id, verb, request, ledger_.sources, {}}});
  ++ledger_.totals.words;
  if (ledger_.sources.size() > 1) ++ledger_.totals.words_to_two;
  if (!holds) ledger_.requests[request].given_back = true;
  return begins(*id, std::move(of), milliseconds{0});
}

void simulated_engine::abort(operation_id which) {
  if (stopped_ || !at_.context->operations.find(which)) return;
  if (const auto found = open_.find(which); found != open_.end()) found->second.given_up = true;
  at_.order(engine_command{abort_operation{which, "the engine gives it up"}});
}

void simulated_engine::stop() {
  stopped_ = true;
  values_.stop();
  at_.order(engine_command{stop_runner{}});
}

// -- events

void simulated_engine::wrong(const operation& of, const std::string& what) const {
  const auto* kind = of.kind == operation_kind::send      ? "send"
                     : of.kind == operation_kind::receive ? "receive"
                                                          : "word";
  ledger_.violate(at_.name + ": the " + kind + " of " + of.request + " " + what);
}

void simulated_engine::take_events() {
  for (auto& told : at_.context->events.take(1000)) {
    if (values_.take(told)) continue;
    const auto found = open_.find(told.operation);
    if (found == open_.end()) {
      return ledger_.violate(at_.name + ": an event for operation " +
                             std::to_string(told.operation.value) + ", which is over");
    }
    auto& of = found->second;
    if (auto* blocks = std::get_if<event_allocated>(&told.what)) {
      if (of.concluded || !of.blocks.empty()) wrong(of, "is allocated blocks twice, or too late");
      of.mine = blocks->blocks;
      of.blocks = blocks->blocks.blocks;
      opens(told.operation, of, of.blocks);
    } else if (const auto* layers = std::get_if<event_layers>(&told.what)) {
      layers_came(of, layers->slice);
    } else if (auto* done = std::get_if<event_done>(&told.what)) {
      const auto attempt = done->aux.size() != 2
                               ? 0U
                               : static_cast<std::uint32_t>(done->aux[0]) +
                                     256U * static_cast<std::uint32_t>(done->aux[1]);
      ends(told.operation, of, std::nullopt, attempt);
    } else if (auto* failed = std::get_if<event_failed>(&told.what)) {
      ends(told.operation, of, failed->why, 0);
    } else if (std::holds_alternative<event_unpinned>(told.what)) {
      if (!of.concluded) wrong(of, "is unpinned before its outcome");
      if (of.kind == operation_kind::receive) check_left(of);
      closes(told.operation);
      // What was not named yet was not pinned, and may be another's since it was given back.
      of.blocks.resize(of.blocks.size() - of.later.size());
      scribble(of);
      give_back(of);
      if (of.slot) free_slots_.insert(*of.slot);
      open_.erase(found);
    }
  }
}

void simulated_engine::ends(operation_id id, operation& of,
                            const std::optional<troupe::error>& failure, std::uint32_t attempt) {
  ledger_.note(at_.name + ": operation " + std::to_string(id.value) + ", request " + of.request +
               (failure ? " fails: " + to_string(*failure) : " is done"));
  if (std::exchange(of.concluded, true)) return wrong(of, "is told two outcomes");
  of.due = at_.now() + longest_fence;
  auto& sum = ledger_.totals;
  auto& history = ledger_.requests[of.request];
  if (of.kind == operation_kind::send) {
    ledger_.sent_since[at_.context->self.rank].erase(of.request);
  }
  if (failure) {
    ++sum.failed;
    ++sum.reasons[failure->code];
    if (failure->code == errc::aborted) ++sum.aborted;
    if (failure->code == errc::lease_expired) ++sum.lapsed;
    if (of.kind == operation_kind::send) check_patience(of);
    if (of.kind == operation_kind::receive) history.failed.insert(of.attempt);
  } else if (of.kind == operation_kind::receive) {
    ++sum.moved[of.mode];
    delivered_.insert(id);
    check_received(of, attempt);
    for (std::uint32_t rank = 0; rank < ledger_.sources.size(); ++rank) {
      const source_attempt its{rank, attempt};
      if (history.done.contains(its)) wrong(of, "is delivered what its source was done with");
      history.delivered[its].insert(at_.context->self.rank);
    }
  } else if (of.kind == operation_kind::send) {
    ++sum.sources_done;
    check_done(of);
  } else if (of.kind == operation_kind::release) {
    check_given_back(of);
  }
  if (of.early) give_back(of);
  if (of.kind == operation_kind::hold || of.kind == operation_kind::release) open_.erase(id);
}

void simulated_engine::layers_came(const operation& of, const cache_slice& slice) {
  if (of.concluded) return wrong(of, "is told of layers after its outcome");
  const auto attempts = ledger_.requests[of.request].attempts;
  each_piece(of, of.prefix, std::min(slice.token_end, of.tokens),
             [&](const piece& where, std::uint32_t token) {
               if (where.layer < slice.layer_begin || where.layer >= slice.layer_end) return;
               bool right = false;
               for (auto i = attempts; i > 0 && !right; --i) right = holds(of, i, where, token);
               if (!right) wrong(of, "is told of layers that have not arrived");
             });
}

/// All decode ranks have what a source is done with.
void simulated_engine::check_done(const operation& of) {
  auto& history = ledger_.requests[of.request];
  const source_attempt mine{at_.context->self.rank, of.attempt};
  history.done.insert(mine);
  const auto takers = ledger_.divided[simulation::decode].ranks;
  const auto have = history.delivered[mine].size();
  if (have < takers) {
    wrong(of, "is done, and " + std::to_string(have) + " of " + std::to_string(takers) +
                  " ranks have it");
  }
  if (takers == 1) return;
  auto& sum = ledger_.totals;
  ++sum.for_two;
  if (history.failed.contains(of.attempt)) ++sum.once_more;
  if (of.held_for == takers) ++sum.held_by_two;
}

/// With a retry window no decode rank ends the source at once: another attempt may come.
void simulated_engine::check_patience(const operation& of) const {
  const bool by_an_engine = of.given_up || stopped_ || ledger_.requests.at(of.request).given_back;
  if (!by_an_engine && at_.now() < of.may_fail) {
    wrong(of, "fails before its retry window is over");
  }
}

/// No source goes on that was there when the request was given back.
void simulated_engine::check_given_back(const operation& of) const {
  for (const auto& [rank, sent] : ledger_.sent_since) {
    const auto found = sent.find(of.request);
    if (found != sent.end() && found->second < of.began) {
      wrong(of, "is done, and the source at rank " + std::to_string(rank) + " goes on");
    }
  }
}

void simulated_engine::check_received(const operation& of, std::uint32_t attempt) {
  if (of.attempt != 0 && attempt != of.attempt) {
    return wrong(of, "gets attempt " + std::to_string(attempt) + " instead of " +
                         std::to_string(of.attempt));
  }
  if (ledger_.sources.size() > 1) {
    ++ledger_.totals.from_two;
    if (ledger_.divided[simulation::prefill].parts) ++ledger_.totals.from_parts;
  }
  const auto check = [&](const piece& where, std::uint32_t token) {
    if (!holds(of, attempt, where, token)) {
      wrong(of, "is done, and token " + std::to_string(token) + " of layer " +
                    std::to_string(where.layer) + " is not what attempt " +
                    std::to_string(attempt) + " has");
    }
    adopt(where);
  };
  each_piece(of, of.prefix, of.tokens, check);
  each_state(of, [&](const piece& where) { check(where, 0); });
}

/// A receive that has failed leaves each piece as it was or as it was computed, and nothing more
/// comes behind its last event.
void simulated_engine::check_left(const operation& of) {
  const auto attempts = ledger_.requests[of.request].attempts;
  const auto check = [&](const piece& where, std::uint32_t token) {
    bool right = unchanged(where);
    for (auto i = attempts; i > 0 && !right; --i) right = holds(of, i, where, token);
    if (!right) wrong(of, "leaves bytes that nobody computed");
    adopt(where);
  };
  if (of.blocks.empty()) return;
  each_piece(of, of.prefix, of.tokens, check);
  each_state(of, [&](const piece& where) { check(where, 0); });
  const auto rest = [&](const piece& where, std::uint32_t) {
    if (!unchanged(where)) wrong(of, "changes bytes that it does not ask for");
  };
  const auto all = static_cast<std::uint32_t>(of.blocks.size()) * block_tokens;
  each_piece(of, of.prefix / block_tokens * block_tokens, of.prefix, rest);
  each_piece(of, of.tokens, all, rest);
}

}  // namespace troupe::actors::engine_simulation
