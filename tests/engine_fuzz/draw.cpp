#include <algorithm>
#include <map>

#include "drawing.hpp"

namespace troupe::engine_fuzz {

using kvcache::layer_kind;

namespace {

/// A few bytes per token, so that prompts may be very long.
void draw_small_layers(scenario& s, dice& d) {
  const auto layers = d.one_in(6) ? 80U : d.roll(1, 3);
  s.model.layers = d.one_in(4) ? kvcache::mla_layers(layers, 4)
                               : kvcache::attention_layers(layers, d.roll(1, 2), 1);
}

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
    // The first layer always keeps something of each token.
    const auto kind = !differ  ? usual
                      : i == 0 ? static_cast<layer_kind>(d.roll(1, 2))
                               : static_cast<layer_kind>(d.roll(1, 3));
    const auto its_heads = differ ? d.roll(1, 16) : heads;
    const auto its_dim = differ ? d.roll(1, 8) : dim;
    switch (kind) {
      case layer_kind::attention: s.model.layers.push_back({kind, its_heads, its_dim}); break;
      case layer_kind::mla: s.model.layers.push_back({kind, 0, its_dim * 4}); break;
      case layer_kind::recurrent:
      case layer_kind::opaque: s.model.layers.push_back({layer_kind::recurrent, 0, 0}); break;
    }
  }
}

bool suits(const scenario& s, std::uint32_t ranks) {
  if (!s.has_model() || s.model.layers.front().kind != layer_kind::attention) return true;
  const auto heads = s.model.layers.front().kv_heads;
  return heads % ranks == 0 || ranks % heads == 0;
}

std::uint32_t draw_ranks(const scenario& s, bool few, dice& d) {
  for (;;) {
    const auto ranks =
        few ? d.pick<std::uint32_t>({1, 1, 2})
            : d.pick<std::uint32_t>({1, 1, 1, 1, 2, 2, 2, 2, 3, 4, 4, 5, 6, 7, 8, 16});
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
  // A deployment file can express only one arrangement of latents.
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

/// Splits the states of caches in the engines' own memory into parts, each spread over the ranks in
/// its own way.
void draw_parts(scenario& s) {
  auto d = dice_beside(s, 1);
  if (s.has_model()) return;
  s.parts.resize(s.model.states.size());
  for (std::size_t i = 0; i < s.parts.size(); ++i) {
    if (!d.one_in(2)) continue;
    auto& whole = s.model.states[i].bytes = 0;
    const auto count = d.roll(1, 5);
    for (std::uint32_t part = 0; part < count; ++part) {
      const bool sliced = d.one_in(2);
      const std::uint64_t bytes =
          sliced ? std::uint64_t{s.prefill.ranks} * s.decode.ranks * d.roll(1, 9)
                 : d.roll_log(1, 1000);
      s.parts[i].push_back(
          {bytes, sliced ? kvcache::state_sharding::sliced : kvcache::state_sharding::replicated});
      whole += bytes;
    }
  }
}

/// Draws whether a file names the nodes.
void draw_naming(scenario& s) {
  auto d = dice_beside(s, 2);
  if (s.has_model() || !d.one_in(4)) return;
  s.named_by = d.one_in(2) ? naming::open : naming::open_both;
  // A node that both sends and receives needs slots for both.
  if (s.is_mutual() && !s.model.states.empty()) s.model.state_slots = 12;
}

/// Bytes that a token takes in all caches, if it has a block in each group of layers.
std::uint64_t bytes_of_token_in_groups(const scenario& s) {
  std::uint64_t bytes = 0;
  for (std::uint32_t node = 0; node < s.nodes(); ++node) {
    std::map<std::uint32_t, std::uint64_t> block_of_region;
    for (const auto& layer : s.layout_of(node).layers) {
      for (const auto& plane : layer.planes) block_of_region[plane.region] = plane.block_stride;
    }
    for (const auto& [region, block] : block_of_region) bytes += block;
  }
  std::uint32_t fewest = s.block_tokens(0);
  for (std::uint32_t t = 1; t < s.tables(); ++t) fewest = std::min(fewest, s.block_tokens(t));
  return bytes * s.tables() / fewest + 1;
}

/// Bytes that a token takes in all caches.
std::uint64_t bytes_of_token(const scenario& s) {
  if (!s.groups.empty()) return bytes_of_token_in_groups(s);
  std::uint64_t block = 0;
  for (std::uint32_t node = 0; node < s.nodes(); ++node)
    block += kvcache::bytes_per_block(s.layout_of(node));
  return block / s.model.block_tokens + 1;
}

/// How many receives of a request a decode rank has blocks for at once.
std::uint32_t times_received(const request_plan& r) {
  return r.decode_again || r.asked_late ? 2 : 1;
}

/// Each put may use one block, and hold another once the first is given back.
std::uint32_t blocks_of_puts(const round& now) {
  std::uint32_t blocks = 0;
  for (const auto& put : now.puts) blocks += put.frees_early() ? 2 : 1;
  return blocks;
}

/// The blocks that a side's pool needs for the groups that need the most.
std::uint32_t blocks_of_groups(const scenario& s, const side& its) {
  std::uint32_t most = 0;
  for (const auto& one : s.rounds) {
    std::vector<std::uint32_t> sums(s.tables(), 0);
    for (std::uint32_t t = 0; t < s.tables(); ++t) {
      auto& sum = sums[its.pools[t]];
      sum += s.blocks_of(s.shared_tokens(one), t);
      if (t == s.table_of(0)) sum += blocks_of_puts(one);
      for (const auto& r : one.requests) {
        const auto first = std::min(r.windows[t].held, r.windows[t].asked) / s.block_tokens(t);
        const auto blocks = s.blocks_of(r.tokens, t);
        sum += (blocks - std::min(blocks, first)) * times_received(r);
      }
    }
    most = std::max(most, std::ranges::max(sums));
  }
  // A wrong call names one block of each group.
  return std::max(most, s.tables());
}

void draw_blocks(scenario& s, dice& d) {
  if (!s.groups.empty()) {
    for (auto* its : {&s.prefill, &s.decode})
      its->blocks = blocks_of_groups(s, *its) + d.roll(1, 6);
    return;
  }
  std::uint32_t most = 0;
  for (const auto& one : s.rounds) {
    auto sum = one.shared_blocks + blocks_of_puts(one);
    for (const auto& r : one.requests) sum += s.blocks_of(r.tokens) * times_received(r);
    most = std::max(most, sum);
  }
  s.prefill.blocks = most + d.roll(1, 6);
  s.decode.blocks = most + d.roll(1, 6);
}

/// Draws whose memory the caches lie in.
void draw_memory(scenario& s, dice& d) {
  const bool pools = d.one_in(2);
  const bool of_prefill = d.one_in(2);
  const bool of_decode = !of_prefill || d.one_in(2);
  const bool on_gpus = d.one_in(8);
  if (s.backend == "xgmi") {
    for (auto* its : {&s.prefill, &s.decode}) its->pooled = its->on_gpu = true;
  } else if (pools) {
    // NICs do not accept what doubles export.
    const bool gpus = on_gpus && s.backend != "rdma";
    s.prefill.pooled = of_prefill;
    s.decode.pooled = of_decode;
    s.prefill.on_gpu = gpus && of_prefill;
    s.decode.on_gpu = gpus && of_decode;
  }
}

/// Packs attention layers of caches in the engines' own memory; not the first layer, which values
/// are put from. Uses its own dice, so that the stories of other seeds stay the same.
void draw_packed(scenario& s) {
  dice d{s.seed * 0x9E3779B97F4A7C15ULL + 7};
  if (s.has_model() || !d.one_in(3)) return;
  const auto layers = std::min<std::size_t>(s.model.layers.size(), 64);
  for (std::size_t l = 1; l < layers; ++l) {
    const bool attention = s.model.layers[l].kind == layer_kind::attention;
    if (attention && d.one_in(2)) s.packed |= std::uint64_t{1} << l;
  }
}

/// Draws whether Troupe allocates the memory of caches that are the engines' own.
void draw_allocated(scenario& s) {
  auto d = dice_beside(s, 6);
  for (auto* its : {&s.prefill, &s.decode, &s.aside}) its->allocated = d.one_in(4) && !its->pooled;
}

/// Adds a node that no edge touches.
void draw_aside(scenario& s, dice& d) {
  s.has_aside = d.one_in(4);
  s.aside.blocks = 3;
  draw_arrangement(s.aside, s, d);
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
  // The sockets of shm end only with a process.
  const bool breaks = d.one_in(2);
  s.may_break = breaks && s.where == processes::one && s.backend == "tcp";
  const auto deadline = d.roll_log(2, 3000);
  if (d.one_in(4)) s.default_deadline_ms = deadline;
  const bool is_long = d.one_in(16);
  draw_memory(s, d);
  s.model.dtype = is_long ? "fp8" : d.pick<const char*>({"fp8", "bf16", "fp32"});
  s.model.block_tokens = d.one_in(4)   ? d.roll(1, 5)
                         : d.one_in(8) ? d.roll_log(32, 1024)
                                       : d.pick<std::uint32_t>({4, 16, 16, 32});
  if (is_long) {
    draw_small_layers(s, d);
  } else {
    draw_layers(s, d);
  }
  s.prefill.ranks = draw_ranks(s, is_long, d);
  do {
    s.decode.ranks = draw_ranks(s, is_long, d);
  } while (s.prefill.ranks + s.decode.ranks > 18);
  if (s.decode.ranks <= 4 && d.one_in(3)) s.decode.replicas = 2;
  draw_arrangement(s.prefill, s, d);
  draw_arrangement(s.decode, s, d);
  draw_aside(s, d);
  draw_states(s, d);
  draw_packed(s);
  draw_parts(s);
  draw_naming(s);
  draw_groups(s);
  draw_allocated(s);

  // Most stories are small, so that there are many; some are as large as allowed.
  const auto bits = d.roll(14, d.one_in(6) ? 26 : 21);
  const auto budget =
      is_long ? most_bytes : std::min<std::uint64_t>(most_bytes, std::uint64_t{1} << bits);
  const auto tokens = std::clamp<std::uint64_t>(budget / bytes_of_token(s) / 2, 1,
                                                is_long ? 2 * most_tokens_ever : most_tokens_ever);
  const auto rounds = is_long ? 1 : d.roll(1, 3);
  auto windows = dice_beside(s, 4);
  for (std::uint32_t i = 1; i <= rounds; ++i) {
    s.rounds.push_back(draw_round(s, static_cast<std::uint32_t>(tokens), i == rounds, d));
    draw_windows(s, s.rounds.back(), windows);
  }
  draw_blocks(s, d);
  return s;
}

}  // namespace troupe::engine_fuzz
