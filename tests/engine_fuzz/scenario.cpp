#include "scenario.hpp"

#include <algorithm>
#include <bit>
#include <numeric>

namespace troupe::engine_fuzz {

using kvcache::layer_kind;

std::uint32_t dice::roll_log(std::uint32_t low, std::uint32_t high) {
  if (low >= high) return low;
  const auto first = std::bit_width(std::max(low, 1U));
  const auto last = std::bit_width(high);
  const auto bits = roll(static_cast<std::uint32_t>(first), static_cast<std::uint32_t>(last));
  const auto from = std::max<std::uint64_t>(low, std::uint64_t{1} << (bits - 1));
  const auto to = std::min<std::uint64_t>(high, (std::uint64_t{1} << bits) - 1);
  return roll(static_cast<std::uint32_t>(from), static_cast<std::uint32_t>(to));
}

std::string request_plan::name(std::uint64_t scenario, std::uint32_t index) const {
  return "r" + std::to_string(scenario) + "-" + std::to_string(index) + "-" +
         std::to_string(seed % 1000);
}

std::string scenario::name_of(std::uint32_t node) const {
  const auto& its = side_of(node);
  std::string name = is_prefill(node) ? "prefill" : "decode";
  name += "-" + std::to_string(replica_of(node));
  if (its.ranks > 1) name += "-tp" + std::to_string(rank_of(node));
  return name;
}

namespace {

/// A region per layer, [block][token][K or V][head], with gaps between everything.
void spread(kvcache::cache_layout& layout, std::uint64_t seed) {
  dice d{seed};
  std::uint32_t region = 0;
  for (auto& layer : layout.layers) {
    if (layer.planes.empty()) continue;
    const std::uint64_t gap = d.roll(0, 5);
    const std::uint64_t base = d.roll(0, 9);
    const auto bytes = layer.planes[0].head_bytes;
    const auto head = bytes + (d.one_in(2) ? gap : 0);
    const auto row = head * layer.planes[0].heads;
    const auto token = row * layer.planes.size() + gap;
    for (std::size_t p = 0; p < layer.planes.size(); ++p) {
      layer.planes[p] = {region,         layer.planes[p].heads,
                         base + p * row, token * layout.block_tokens + gap,
                         token,          head,
                         bytes};
    }
    ++region;
  }
  std::uint64_t at = d.roll(0, 9);
  for (auto& state : layout.states) {
    state.region = region;
    state.base = at;
    state.slot_stride = state.slot_bytes + d.roll(0, 9);
    at += state.slot_stride * state.slots + d.roll(0, 9);
  }
}

kvcache::cache_shape shape_of(const scenario& s, const side& its, std::uint32_t rank) {
  auto shape = s.model;
  shape.blocks = std::max(its.blocks, 1U);
  shape.tp_rank = rank;
  shape.tp_size = its.ranks;
  for (auto& state : shape.states) {
    // `bytes` is of the whole replica until here.
    if (state.sharding == kvcache::state_sharding::sliced) state.bytes /= its.ranks;
  }
  return shape;
}

}  // namespace

kvcache::cache_layout scenario::layout_of(std::uint32_t node) const {
  const auto& its = side_of(node);
  auto layout = kvcache::make_layout(shape_of(*this, its, rank_of(node)), its.how).value();
  if (its.unnamed) spread(layout, seed + node);
  return layout;
}

namespace {

void draw_layers(scenario& s, dice& d) {
  const auto layers = d.one_in(8) ? d.roll(1, 80) : d.roll(1, 6);
  const auto dim = d.pick<std::uint32_t>({1, 1, 2, 3, 5, 16, 64, 128});
  const auto heads = d.pick<std::uint32_t>({1, 2, 2, 3, 4, 4, 6, 8, 16});
  if (s.has_model()) {
    s.model.layers = d.one_in(4) ? kvcache::mla_layers(layers, dim * 4)
                                 : kvcache::attention_layers(layers, heads, dim);
    return;
  }
  const bool differ = d.one_in(2);
  const auto usual = d.one_in(4) ? layer_kind::mla : layer_kind::attention;
  for (std::uint32_t i = 0; i < layers; ++i) {
    // The first one keeps something of each token.
    const auto kind = !differ  ? usual
                      : i == 0 ? static_cast<layer_kind>(d.roll(1, 2))
                               : static_cast<layer_kind>(d.roll(1, 3));
    const auto its_heads = differ ? d.roll(1, 16) : heads;
    const auto its_dim = differ ? d.roll(1, 8) : dim;
    switch (kind) {
      case layer_kind::attention: s.model.layers.push_back({kind, its_heads, its_dim}); break;
      case layer_kind::mla: s.model.layers.push_back({kind, 0, its_dim * 4}); break;
      case layer_kind::recurrent: s.model.layers.push_back({kind, 0, 0}); break;
    }
  }
}

bool suits(const scenario& s, std::uint32_t ranks) {
  if (!s.has_model() || s.model.layers.front().kind != layer_kind::attention) return true;
  const auto heads = s.model.layers.front().kv_heads;
  return heads % ranks == 0 || ranks % heads == 0;
}

std::uint32_t draw_ranks(const scenario& s, dice& d) {
  for (;;) {
    const auto ranks = d.pick<std::uint32_t>({1, 1, 1, 1, 2, 2, 2, 2, 3, 4, 4, 5, 6, 7, 8, 16});
    if (suits(s, ranks)) return ranks;
  }
}

void draw_arrangement(side& its, const scenario& s, dice& d) {
  its.how.order = static_cast<kvcache::block_order>(d.roll(0, 2));
  its.how.kv = static_cast<kvcache::kv_placement>(d.roll(0, 1));
  its.how.inner = static_cast<kvcache::block_inner>(d.roll(0, 1));
  if (its.how.order == kvcache::block_order::block_interleaved)
    its.how.kv = kvcache::kv_placement::together;
  if (!its.pooled && its.how.order == kvcache::block_order::layers_first && d.one_in(2))
    its.how.regions = kvcache::region_use::per_layer;
  // A file knows one arrangement of latents.
  if (its.pooled && s.model.layers.front().kind == layer_kind::mla) {
    its.how.kv = kvcache::kv_placement::together;
    its.how.inner = kvcache::block_inner::token_major;
  }
  its.unnamed = !s.has_model() && d.one_in(4);
  its.polling = d.one_in(8);
}

void draw_states(scenario& s, dice& d) {
  if (!d.one_in(3)) return;
  s.model.state_slots = 8;
  if (s.has_model()) {
    s.model.states.push_back({"state", d.roll_log(1, 5000), kvcache::state_sharding::replicated});
    return;
  }
  const auto count = d.roll(1, 3);
  for (std::uint32_t i = 0; i < count; ++i) {
    const bool sliced = d.one_in(2);
    const std::uint64_t whole = sliced
                                    ? std::uint64_t{s.prefill.ranks} * s.decode.ranks * d.roll(1, 9)
                                    : d.roll_log(1, 5000);
    s.model.states.push_back(
        {"state" + std::to_string(i), whole,
         sliced ? kvcache::state_sharding::sliced : kvcache::state_sharding::replicated});
  }
}

/// Bytes that a token takes in all caches.
std::uint64_t bytes_of_token(const scenario& s) {
  std::uint64_t block = 0;
  for (std::uint32_t node = 0; node < s.nodes(); ++node)
    block += kvcache::bytes_per_block(s.layout_of(node));
  return block / s.model.block_tokens + 1;
}

void draw_mishap(request_plan& r, const scenario& s, dice& d) {
  if (!d.one_in(3)) return;
  if (s.where == processes::several && d.one_in(2)) {
    r.what = d.pick(
        {mishap::prefill_dies, mishap::decode_dies, mishap::prefill_stands, mishap::decode_stands});
  } else {
    r.what = d.pick({mishap::decode_aborts, mishap::prefill_aborts, mishap::short_seal,
                     mishap::decode_deadline});
  }
  const bool of_prefill = r.what == mishap::prefill_aborts || r.what == mishap::prefill_dies ||
                          r.what == mishap::prefill_stands;
  r.rank = d.roll(0, (of_prefill ? s.prefill.ranks : s.decode.ranks) - 1);
}

request_plan draw_request(const scenario& s, std::uint32_t most_tokens, dice& d) {
  request_plan r;
  r.seed = d.next();
  r.tokens = d.roll_log(1, most_tokens);
  r.source_tokens = r.tokens;
  if (d.one_in(4)) r.prefix = d.roll(0, r.tokens - 1);
  if (d.one_in(40)) r.prefix = r.tokens;
  if (d.one_in(3)) r.aux_bytes = d.one_in(10) ? 65'536 : d.roll_log(1, 4096);
  r.names_blocks = !s.decode.pooled || r.prefix > 0 || d.one_in(2);
  r.frees_early = d.one_in(3);
  r.two_replicas = s.decode.replicas > 1 && d.one_in(2);
  draw_mishap(r, s, d);
  if (r.what != mishap::none) r.two_replicas = false;
  if (r.what == mishap::short_seal) {
    if (r.tokens == 1 || r.prefix + 1 >= r.tokens) {
      r.what = mishap::none;
    } else {
      r.source_tokens = d.roll(r.prefix + 1, r.tokens - 1);
    }
  }
  // Whose wrong end is not the end of the source.
  r.decode_again = s.retries && (r.what == mishap::decode_aborts ||
                                 r.what == mishap::decode_deadline || r.what == mishap::short_seal);
  r.asked_late = r.what == mishap::none && d.one_in(4);
  if (!d.one_in(6)) {
    const auto chunks = d.roll(1, 4);
    for (std::uint32_t i = 1; i < chunks; ++i) r.chunks.push_back(d.roll(1, r.source_tokens));
    r.chunks.push_back(r.source_tokens);
    std::ranges::sort(r.chunks);
    r.chunks.erase(std::ranges::unique(r.chunks).begin(), r.chunks.end());
  }
  return r;
}

using story = std::vector<act>;

story prefill_story(const scenario& s, const request_plan& r, std::uint32_t node,
                    std::uint32_t index, dice& d) {
  story all{{act_kind::send, node, index}};
  const auto layers = static_cast<std::uint32_t>(s.model.layers.size());
  for (std::uint32_t chunk = 0; chunk < r.chunks.size(); ++chunk) {
    const auto step = d.roll(1, std::max(1U, layers / d.roll(1, 4)));
    story groups;
    for (std::uint32_t layer = 0; layer < layers; layer += step) {
      groups.push_back(
          {act_kind::compute, node, index, layer, std::min(layers, layer + step), chunk});
    }
    if (d.one_in(4)) std::ranges::reverse(groups);
    all.insert(all.end(), groups.begin(), groups.end());
  }
  all.push_back({act_kind::seal, node, index});
  return all;
}

/// What belongs to one request, a story for each node that takes part: each keeps its order.
std::vector<story> stories_of(const scenario& s, const request_plan& r, std::uint32_t index,
                              dice& d) {
  std::vector<story> all;
  for (std::uint32_t p = 0; p < s.prefill.ranks; ++p)
    all.push_back(prefill_story(s, r, p, index, d));
  const auto first_replica = r.two_replicas || s.decode.replicas == 1
                                 ? 0
                                 : static_cast<std::uint32_t>(r.seed % s.decode.replicas);
  for (std::uint32_t rank = 0; rank < s.decode.ranks; ++rank) {
    const auto node = s.decode_node(first_replica, rank);
    story its{{act_kind::receive, node, index}};
    if (r.decode_again && (r.what == mishap::short_seal || r.rank == rank)) {
      if (r.what == mishap::decode_aborts) its.push_back({act_kind::abort_receive, node, index});
      its.push_back({act_kind::wait_for_outcome, node, index, node});
      its.push_back({act_kind::receive_again, node, index});
    } else if (r.what == mishap::decode_aborts && r.rank == rank) {
      its.push_back({act_kind::pause, node, index, d.roll_log(1, 5000)});
      its.push_back({act_kind::abort_receive, node, index});
    }
    if (r.asked_late && rank == 0) {
      its.push_back({act_kind::wait_for_sends, node, index});
      its.push_back({act_kind::wait_for_outcome, node, index, node});
      its.push_back({act_kind::receive_late, node, index});
    }
    all.push_back(std::move(its));
    if (!r.two_replicas) continue;
    const auto second = s.decode_node(1, rank);
    story others;
    if (d.one_in(2)) others.push_back({act_kind::wait_for_outcome, second, index, node});
    others.push_back({act_kind::receive, second, index});
    all.push_back(std::move(others));
  }
  const auto happens = [&](act_kind what, std::uint32_t node) {
    // Somewhere in the story of that node, behind its first step.
    for (auto& its : all) {
      if (its.front().node != node) continue;
      const auto at = d.roll(1, static_cast<std::uint32_t>(its.size()));
      its.insert(its.begin() + at, {what, node, index});
      return;
    }
  };
  const auto victim = s.decode_node(first_replica, std::min(r.rank, s.decode.ranks - 1));
  if (r.what == mishap::prefill_aborts) happens(act_kind::abort_send, r.rank);
  if (r.what == mishap::prefill_dies) happens(act_kind::die, r.rank);
  if (r.what == mishap::decode_dies) happens(act_kind::die, victim);
  if (r.what == mishap::prefill_stands) happens(act_kind::stand, r.rank);
  if (r.what == mishap::decode_stands) happens(act_kind::stand, victim);
  return all;
}

/// One order of all stories' steps.
story merge(std::vector<story> stories, dice& d) {
  story all;
  // Some keep their turn for long, so that either side may be far ahead.
  const auto turn = d.pick<std::uint32_t>({1, 1, 3, 100});
  std::vector<std::size_t> at(stories.size(), 0);
  std::vector<std::size_t> left(stories.size());
  std::iota(left.begin(), left.end(), 0);
  while (!left.empty()) {
    const auto i = d.roll(0, static_cast<std::uint32_t>(left.size()) - 1);
    const auto which = left[i];
    for (std::uint32_t n = 0; n < turn && at[which] < stories[which].size(); ++n) {
      all.push_back(stories[which][at[which]]);
      ++at[which];
    }
    if (at[which] == stories[which].size()) left.erase(left.begin() + i);
    if (d.one_in(6)) all.push_back({act_kind::pause, 0, 0, d.roll_log(1, 4000)});
  }
  return all;
}

bool kills(mishap what) {
  return what == mishap::prefill_dies || what == mishap::decode_dies ||
         what == mishap::prefill_stands || what == mishap::decode_stands;
}

round draw_round(scenario& s, std::uint32_t most_tokens, bool last, dice& d) {
  round made;
  const auto count = d.pick<std::uint32_t>({1, 1, 2, 3, 4});
  std::vector<story> stories;
  bool killed = false;
  for (std::uint32_t index = 0; index < count; ++index) {
    auto r = draw_request(s, std::max(1U, most_tokens / count), d);
    // One process of one round, which is the last: nobody comes after it.
    if (kills(r.what) && (killed || !last)) {
      r.what = mishap::none;
      r.rank = 0;
    }
    killed |= kills(r.what);
    r.slot = index;
    for (auto& one : stories_of(s, r, index, d)) stories.push_back(std::move(one));
    made.requests.push_back(std::move(r));
  }
  s.may_freeze |= killed;
  const auto some_node = [&] { return d.roll(0, s.nodes() - 1); };
  const auto extras = d.roll(0, 4);
  for (std::uint32_t i = 0; i < extras; ++i)
    stories.push_back({{act_kind::call_wrongly, some_node(), 0, d.roll(0, wrong_call_count - 1)}});
  // Values of who is killed are not looked for.
  const auto puts = killed ? 0 : d.roll(0, 2);
  for (std::uint32_t i = 0; i < puts; ++i) {
    const auto bytes = d.one_in(6) ? 0 : d.roll_log(1, 2U << 20U);
    stories.push_back(
        {{act_kind::put, some_node(), 0, some_node(), bytes, d.one_in(2) ? d.roll(1, 2) : 0}});
  }
  if (s.may_break && !killed && d.one_in(2)) stories.push_back({{act_kind::break_links, 0}});
  made.acts = merge(std::move(stories), d);
  for (const auto& r : made.requests) {
    if (r.what != mishap::prefill_stands && r.what != mishap::decode_stands) continue;
    for (const auto& one : made.acts) {
      if (one.what != act_kind::stand) continue;
      made.acts.push_back({act_kind::wake, one.node});
      break;
    }
  }
  return made;
}

void draw_blocks(scenario& s, dice& d) {
  std::uint32_t most = 0;
  for (const auto& one : s.rounds) {
    std::uint32_t sum = 0;
    for (const auto& r : one.requests) {
      const auto needed = (r.tokens + s.model.block_tokens - 1) / s.model.block_tokens;
      sum += needed * (r.decode_again || r.asked_late ? 2 : 1);
    }
    most = std::max(most, sum);
  }
  s.prefill.blocks = most + d.roll(1, 6);
  s.decode.blocks = most + d.roll(1, 6);
}

}  // namespace

scenario draw(std::uint64_t seed, const std::vector<std::string>& backends,
              std::uint64_t most_bytes) {
  dice d{seed * 0xD1342543DE82EF95ULL + 1};
  scenario s;
  s.seed = seed;
  s.where = d.one_in(3) ? processes::several : processes::one;
  s.backend = backends[d.roll(0, static_cast<std::uint32_t>(backends.size()) - 1)];
  s.reads = d.one_in(3);
  s.lanes = d.roll(1, 4);
  s.retries = d.one_in(2);
  // The sockets of shm end with a process only.
  s.may_break = s.where == processes::one && s.backend == "tcp" && d.one_in(2);
  if (d.one_in(2)) {
    s.prefill.pooled = d.one_in(2);
    s.decode.pooled = !s.prefill.pooled || d.one_in(2);
  }
  s.model.dtype = d.pick<const char*>({"fp8", "bf16", "fp32"});
  s.model.block_tokens = d.one_in(4)   ? d.roll(1, 5)
                         : d.one_in(8) ? d.roll_log(32, 1024)
                                       : d.pick<std::uint32_t>({4, 16, 16, 32});
  draw_layers(s, d);
  s.prefill.ranks = draw_ranks(s, d);
  do {
    s.decode.ranks = draw_ranks(s, d);
  } while (s.prefill.ranks + s.decode.ranks > 18);
  if (s.decode.ranks <= 4 && d.one_in(3)) s.decode.replicas = 2;
  draw_arrangement(s.prefill, s, d);
  draw_arrangement(s.decode, s, d);
  draw_states(s, d);

  // Most are small, so that there are many; some are as large as may be.
  const auto budget =
      std::min<std::uint64_t>(most_bytes, std::uint64_t{1} << d.roll(14, d.one_in(6) ? 26 : 21));
  const auto tokens = std::clamp<std::uint64_t>(budget / bytes_of_token(s) / 2, 1, 131'072);
  const auto rounds = d.roll(1, 3);
  for (std::uint32_t i = 1; i <= rounds; ++i)
    s.rounds.push_back(draw_round(s, static_cast<std::uint32_t>(tokens), i == rounds, d));
  draw_blocks(s, d);
  return s;
}

}  // namespace troupe::engine_fuzz
