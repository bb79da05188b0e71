#include "transfers.hpp"

#include <algorithm>
#include <chrono>
#include <variant>

namespace troupe::engine_fuzz {

using namespace std::chrono_literals;
using std::chrono::milliseconds;

namespace {

/// Longer than a run.
constexpr milliseconds no_deadline = 10min;

// Further properties of a request, derived from its seed, so that older seeds still draw the same
// story.

/// Whether the blocks of its sends are named as they are computed.
bool grows(const request_plan& r) {
  return r.seed / 6 % 3 == 0;
}
bool tells_wanted(const request_plan& r) {
  return r.seed / 18 % 2 == 0;
}
/// How many bytes the receive expects at the start of `aux`; 0: any `aux` is right.
std::size_t expected_bytes(const request_plan& r) {
  return r.seed / 36 % 2 == 0 ? std::min<std::size_t>(r.aux_bytes, 1 + r.seed % 64) : 0;
}
bool parks_for_ever(const request_plan& r) {
  return r.seed / 72 % 2 == 0;
}
/// Whether a growing send names the blocks of its groups of layers last group first.
bool names_last_first(const request_plan& r) {
  return r.seed / 576 % 2 == 0;
}

std::vector<std::byte> aux_of(const request_plan& r) {
  std::vector<std::byte> aux(r.aux_bytes);
  pattern(r.seed + 5, aux);
  return aux;
}

}  // namespace

node_transfers::node_transfers(const scenario& s, std::uint32_t node, engine& e, cache_model& model,
                               cache_blocks& blocks, outcomes& ended, finder found, tally& counts)
    : s_{s},
      node_{node},
      its_{s.side_of(node)},
      engine_{e},
      model_{model},
      blocks_{blocks},
      ended_{ended},
      found_{std::move(found)},
      counts_{counts} {}

void node_transfers::begin_round(std::uint32_t index) {
  round_index_ = index;
  round_ = &s_.rounds[index];
}

std::string node_transfers::words(const transfer& t) const {
  return std::string{to_string(t.what)} + " of request " + std::to_string(t.request) +
         " in round " + std::to_string(round_index_);
}

std::string node_transfers::open() const {
  std::string all;
  for (const auto& [id, t] : live_) {
    all += " " + std::string{to_string(t.what)} + " of request " + std::to_string(t.request) +
           (t.outcomes > 0 ? " (not unpinned)" : "");
  }
  return all;
}

bool node_transfers::settled() const {
  return std::ranges::all_of(live_, [](const auto& one) { return one.second.outcomes > 0; });
}

const request_plan& node_transfers::plan(std::uint32_t request) const {
  return round_->requests[request];
}

content node_transfers::content_of(const request_plan& r) const {
  return {r.seed, round_->shared_seed, r.shares ? s_.shared_tokens(*round_) : 0};
}

std::string node_transfers::name(std::uint32_t request) const {
  return plan(request).name(s_.seed, round_index_ * 100 + request);
}

verdict node_transfers::verdict_of(const transfer& t) const {
  return verdict_on(s_, *round_, t.request, node_, t.what);
}

std::pair<const std::uint64_t, node_transfers::transfer>* node_transfers::find(
    std::uint32_t request, part what) {
  for (auto& one : live_)
    if (one.second.request == request && one.second.what == what) return &one;
  return nullptr;
}

void node_transfers::give_back(transfer& t) {
  blocks_.give_back(t.blocks, words(t));
}

std::vector<token_span> node_transfers::tokens_of(const transfer& t, std::uint32_t end) const {
  const auto& r = plan(t.request);
  if (r.windows.empty()) return {{0, end}};
  const bool is_refused =
      t.what == part::receive && r.what == mishap::short_window && r.rank == s_.rank_of(node_);
  std::vector<token_span> tokens;
  for (const auto& w : r.windows)
    tokens.push_back({t.what == part::send ? w.held : is_refused ? w.asked : w.kept, end});
  return tokens;
}

template <class Spec>
void node_transfers::name_tables(Spec& spec, block_tables tables) const {
  if (!s_.groups.empty()) {
    spec.groups = std::move(tables);
  } else if (!tables.empty()) {
    spec.blocks = std::move(tables.front().blocks);
  }
}

// -- sends

void node_transfers::send(std::uint32_t request) {
  const auto& r = plan(request);
  transfer t;
  t.request = request;
  // Room for the tokens that the decode ranks want, or only for those that exist.
  const auto room = r.seed % 2 == 0 ? std::max(r.tokens, r.source_tokens) : r.source_tokens;
  t.blocks = blocks_.take(tokens_of(t, room), r.shares, words(t));
  t.slot = std::max(8U, s_.model.state_slots) - 1 - r.slot;
  t.tokens = {0, r.source_tokens};
  send_spec spec;
  spec.request = name(request);
  spec.grows = grows(r);
  spec.tell_wanted = tells_wanted(r);
  auto tables = t.blocks.tables;
  for (std::size_t i = 0; spec.grows && i < tables.size(); ++i) {
    // The prefix may be given back once the send names it.
    const auto half = r.seed / 144 % 2 * tables[i].blocks.size() / 2;
    tables[i].blocks.resize(std::max<std::size_t>(half, t.blocks.passed[i]));
    t.named.push_back(tables[i].blocks.size());
  }
  name_tables(spec, std::move(tables));
  spec.state_slot = t.slot;
  spec.deadline = no_deadline;
  spec.consumers = r.two_replicas ? 2 * s_.decode.ranks : 0;
  auto sent = engine_.send(std::move(spec));
  if (r.shares) blocks_.prefix_was_used();
  if (!sent) {
    wrong(t, "is refused: " + to_string(sent.error()));
    give_back(t);
    return;
  }
  live_.emplace(sent->value, std::move(t));
}

/// Checks the result of a call on a live operation, which may have ended if it may fail.
void node_transfers::expect_taken(const transfer& t, const result<void>& said) {
  if (said) return;
  if (said.error().code == errc::not_found && !verdict_of(t).is_certain()) return;
  wrong(t, to_string(said.error()));
}

void node_transfers::compute(const act& one) {
  auto* entry = find(one.request, part::send);
  if (entry == nullptr) return;
  auto& t = entry->second;
  const auto& r = plan(one.request);
  const auto begin = one.c == 0 ? 0 : r.chunks[one.c - 1];
  const auto end = r.chunks[one.c];
  compute(t, {one.a, one.b}, {begin, end});
  name_blocks(entry->first, t, end);
  expect_taken(t, engine_.layers_ready(operation_id{entry->first}, one.a, one.b, end));
}

/// Names the blocks that hold so many tokens, or all blocks if `tokens` is empty.
void node_transfers::name_blocks(std::uint64_t operation, transfer& t,
                                 std::optional<std::uint32_t> tokens) {
  for (std::size_t i = 0; i < t.named.size(); ++i) {
    const bool is_last = i + 1 == t.named.size();
    const auto number = names_last_first(plan(t.request)) ? t.named.size() - 1 - i : i;
    const auto table = static_cast<std::uint32_t>(number);
    const auto& of = t.blocks.tables[table];
    auto count = of.blocks.size();
    if (tokens) {
      const auto end = s_.blocks_of(*tokens, table);
      count = std::min<std::size_t>(count,
                                    end - std::min(end, of.first_token / s_.block_tokens(table)));
    }
    if (t.named[table] >= count) continue;
    if (tokens && is_last && i > 0) expect_not_ready(operation, t, *tokens);
    const auto more = std::span{of.blocks}.subspan(t.named[table], count - t.named[table]);
    expect_taken(t, engine_.add_blocks(operation_id{operation}, {more.begin(), more.end()}, table));
    t.named[table] = count;
  }
}

/// Tokens for which one group of layers has no block yet are not ready in any group.
void node_transfers::expect_not_ready(std::uint64_t operation, const transfer& t,
                                      std::uint32_t tokens) {
  const auto said = engine_.layers_ready(operation_id{operation}, 0, 1, tokens);
  if (!said && said.error().code == errc::out_of_range) {
    ++counts_.wrong_calls;
  } else if (said) {
    wrong(t, "layers are ready that one group has no block for");
  } else {
    expect_taken(t, said);
  }
}

/// Computes all but the shared prefix, which is there already.
void node_transfers::compute(const transfer& t, layer_span layers, token_span tokens) {
  const auto& r = plan(t.request);
  model_.compute(blocks_.own(t.blocks), layers, tokens, content_of(r),
                 tokens.end == r.source_tokens);
}

void node_transfers::seal(std::uint32_t request) {
  auto* entry = find(request, part::send);
  if (entry == nullptr) return;
  auto& t = entry->second;
  const auto& r = plan(request);
  if (r.chunks.empty()) compute(t, model_.all_layers(), {0, r.source_tokens});
  model_.compute_state(t.slot, r.seed);
  name_blocks(entry->first, t, std::nullopt);
  expect_taken(t, engine_.seal(operation_id{entry->first}, r.source_tokens, aux_of(r)));
  t.sealed = true;
  if (r.frees_early && its_.pooled) give_back(t);
}

std::optional<live_send> node_transfers::some_live_send() const {
  for (const auto& [id, t] : live_) {
    if (t.what != part::send || t.sealed || !verdict_of(t).is_certain()) continue;
    live_send live{operation_id{id}, name(t.request), ~std::uint32_t{0}, !t.named.empty()};
    for (std::uint32_t i = 0; i < t.blocks.tables.size(); ++i) {
      const auto& of = t.blocks.tables[i];
      const auto held = static_cast<std::uint32_t>(of.blocks.size()) * s_.block_tokens(i);
      live.room = std::min(live.room, of.first_token + held);
    }
    return live;
  }
  return std::nullopt;
}

// -- receives

void node_transfers::receive_again(std::uint32_t request) {
  const auto first = ended_.find({request, part::receive});
  if (first != ended_.end() && first->second != "done") receive(request, part::receive_again);
}

void node_transfers::receive(std::uint32_t request, part what) {
  const auto& r = plan(request);
  transfer t;
  t.what = what;
  t.request = request;
  const auto wanted = what == part::receive_again ? r.source_tokens : r.tokens;
  t.slot = r.slot + (what == part::receive ? 0 : 4);
  if (!s_.model.states.empty()) t.slot %= s_.model.state_slots;
  t.tokens = {r.prefix, wanted};
  t.told.assign(s_.model.layers.size(), r.prefix);
  if (r.names_blocks) t.blocks = blocks_.take(tokens_of(t, wanted), r.shared_there, words(t));
  receive_spec spec;
  spec.request = name(request);
  spec.sources = sources_of(r);
  spec.mode = s_.reads ? actors::transfer_mode::read : actors::transfer_mode::write;
  spec.tokens = wanted;
  spec.prefix_tokens = r.prefix;
  name_tables(spec, t.blocks.tables);
  spec.state_slot = t.slot;
  spec.deadline = no_deadline;
  spec.expect = aux_of(r);
  spec.expect.resize(expected_bytes(r));
  if (parks_for_ever(r)) spec.park = no_deadline;
  if (what == part::receive && r.what == mishap::decode_deadline && r.rank == s_.rank_of(node_))
    spec.deadline = milliseconds{1 + r.seed % 60};
  auto asked = engine_.receive(std::move(spec));
  if (r.shared_there) blocks_.prefix_was_used();
  if (!asked) {
    wrong(t, "is refused: " + to_string(asked.error()));
    give_back(t);
    return;
  }
  if (its_.pooled && r.frees_early && !t.blocks.tables.empty()) {
    const auto in_prefix = r.prefix / s_.model.block_tokens - t.blocks.passed.front();
    if (in_prefix > 0) blocks_.give_back_prefix(t.blocks, in_prefix, words(t));
  }
  live_.emplace(asked->value, std::move(t));
}

std::vector<std::string> node_transfers::sources_of(const request_plan& r) const {
  std::vector<std::string> names;
  for (const auto source : s_.sources_of(r)) names.push_back(s_.name_of(source));
  if (r.seed % 3 == 0) std::ranges::reverse(names);
  return names;
}

void node_transfers::tell_sources(std::uint32_t request, part what) {
  transfer t;
  t.what = what;
  t.request = request;
  auto sources = sources_of(plan(request));
  const auto said = what == part::hold ? engine_.hold(name(request), std::move(sources))
                                       : engine_.release(name(request), std::move(sources));
  if (!said) {
    wrong(t, "is refused: " + to_string(said.error()));
    return;
  }
  live_.emplace(said->value, std::move(t));
}

void node_transfers::abort(std::uint32_t request, part what) {
  auto* entry = find(request, what);
  if (entry == nullptr || entry->second.outcomes > 0) return;
  // The outcome may already be in the queue.
  (void)engine_.abort(operation_id{entry->first}, "fuzz");
}

// -- events

void node_transfers::take(event& e) {
  const auto entry = live_.find(e.operation.value);
  if (entry == live_.end()) {
    found_("an event of an operation that is over");
    return;
  }
  auto& t = entry->second;
  if (t.what == part::hold || t.what == part::release) {
    take_end(t, e);
    live_.erase(entry);
    return;
  }
  if (auto* a = std::get_if<event_allocated>(&e.what)) {
    t.blocks.owner = a->blocks.owner;
    t.blocks.tables = {{0, std::move(a->blocks.blocks)}};
    t.blocks.passed = {0};
  } else if (const auto* l = std::get_if<event_layers>(&e.what)) {
    take_layers(t, l->slice);
  } else if (auto* d = std::get_if<event_done>(&e.what)) {
    take_done(t, *d);
  } else if (const auto* f = std::get_if<event_failed>(&e.what)) {
    take_failed(t, f->why);
  } else if (const auto* w = std::get_if<event_wanted>(&e.what)) {
    take_wanted(t, *w);
  } else if (std::get_if<event_unpinned>(&e.what) != nullptr) {
    take_unpinned(t);
    live_.erase(entry);
  } else {
    wrong(t, "an event of another kind of operation");
  }
}

/// Takes the outcome of a hold or a release, which has no other event.
void node_transfers::take_end(transfer& t, const event& e) {
  if (std::get_if<event_done>(&e.what) != nullptr) {
    count(t, "done");
  } else if (const auto* f = std::get_if<event_failed>(&e.what)) {
    take_failed(t, f->why);
  } else {
    wrong(t, "an event of another kind of operation");
  }
}

void node_transfers::take_wanted(const transfer& t, const event_wanted& who) {
  const auto& r = plan(t.request);
  if (t.what != part::send || !tells_wanted(r)) wrong(t, "is told who wants it, unasked");
  if (t.outcomes > 0) wrong(t, "is told who wants it after the outcome");
  bool is_decode = false;
  for (std::uint32_t n = 0; n < s_.joined_nodes(); ++n)
    is_decode =
        is_decode || (!s_.sends(r, n) && s_.name_of(n) == who.node && s_.rank_of(n) == who.rank);
  const auto ranks = static_cast<std::uint32_t>(s_.takers_of(r).size());
  const auto expected = ranks * (r.two_replicas ? 2 : 1);
  const bool fits = is_decode && who.ranks == ranks && who.expected == expected &&
                    who.token_begin <= who.token_end && who.token_end <= r.tokens;
  if (!fits) {
    wrong(t, "is wanted by " + who.node + ", rank " + std::to_string(who.rank) + " of " +
                 std::to_string(who.ranks) + ", of " + std::to_string(who.expected) + ", tokens " +
                 std::to_string(who.token_begin) + " to " + std::to_string(who.token_end));
  }
}

void node_transfers::take_layers(transfer& t, const actors::cache_slice& slice) {
  if (t.outcomes > 0) wrong(t, "layers after the outcome");
  for (auto l = slice.layer_begin; l < slice.layer_end; ++l) {
    if (t.told[l] != slice.token_begin) {
      wrong(t, "layer " + std::to_string(l) + " is told from token " +
                   std::to_string(slice.token_begin) + ", it was up to " +
                   std::to_string(t.told[l]));
    }
    t.told[l] = slice.token_end;
  }
  check(t, model_.is_there(t.blocks.tables, {slice.layer_begin, slice.layer_end},
                           {slice.token_begin, slice.token_end}, content_of(plan(t.request))));
}

void node_transfers::count(transfer& t, const std::string& how) {
  if (++t.outcomes > 1) wrong(t, "another outcome: " + how);
  ended_[{t.request, t.what}] = how;
  ++counts_.transfers;
  // A failed receive may not have reached every source.
  if (t.what == part::receive && how != "done") abort(t.request, part::hold);
}

void node_transfers::take_done(transfer& t, const event_done& d) {
  count(t, "done");
  const auto& r = plan(t.request);
  if (!verdict_of(t).may_succeed) wrong(t, "is done, and must fail");
  if (t.what == part::send) return;
  ++counts_.arrived;
  for (std::size_t l = 0; l < t.told.size(); ++l) {
    if (t.told[l] != t.tokens.end && t.tokens.begin < t.tokens.end)
      wrong(t, "is done, and layer " + std::to_string(l) + " was told up to token " +
                   std::to_string(t.told[l]));
  }
  std::vector<std::byte> aux(r.aux_bytes);
  pattern(r.seed + 5, aux);
  if (d.aux != aux) wrong(t, "the engine's own data is not the prefill's");
  const bool moves_state = model_.has_states() && t.tokens.begin < t.tokens.end;
  check(t, model_.is_there(t.blocks.tables, model_.all_layers(), t.tokens, content_of(r)));
  if (moves_state) check(t, model_.state_is_there(t.slot, r.seed));
  model_.arrived(t.blocks.tables, t.tokens, slot_of(t), content_of(r));
  // The data of a finished receive is read and its blocks given back; the fence may still be
  // pending.
  if (its_.pooled && r.frees_early) give_back(t);
}

std::optional<std::uint32_t> node_transfers::slot_of(const transfer& t) const {
  if (!model_.has_states() || t.tokens.begin >= t.tokens.end) return std::nullopt;
  return t.slot;
}

void node_transfers::take_failed(transfer& t, const troupe::error& why) {
  count(t, std::string{to_string(why.code)});
  ++counts_.failed;
  if (why.message.empty()) wrong(t, "failed without a sentence");
  if (!verdict_of(t).admits(why.code)) wrong(t, "failed: " + to_string(why));
}

void node_transfers::take_unpinned(transfer& t) {
  if (t.outcomes == 0) wrong(t, "is unpinned without an outcome");
  const auto how = ended_.find({t.request, t.what});
  const bool failed = how != ended_.end() && how->second != "done";
  if (t.what != part::send && failed && !t.blocks.tables.empty())
    check(t, model_.torn(t.blocks.tables, t.tokens, slot_of(t), content_of(plan(t.request))));
  // Nobody may touch these blocks from here on: the audit finds late bytes. Blocks that were given
  // back earlier may belong to another transfer.
  if (const auto mine = blocks_.own(t.blocks); count_of(mine) > 0) model_.reuse(mine, slot_of(t));
  give_back(t);
}

}  // namespace troupe::engine_fuzz
