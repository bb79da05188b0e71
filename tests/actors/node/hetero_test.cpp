// Caches that are laid out differently on the two sides: other parallel sizes, other arrangements,
// other regions, latents, state tensors. Every byte that arrives is compared with the one expected
// for the model's head, token and layer.

#include <string>

#include "ways.hpp"

namespace troupe::testing {
namespace {

constexpr std::uint32_t tokens = 90;
constexpr std::uint32_t prefix = 21;
constexpr std::uint32_t source_slot = 3;
constexpr std::uint32_t destination_slot = 5;

struct shape {
  std::string name;
  std::string model;
  std::uint32_t prefill_tp{1}, decode_tp{1};
  std::string prefill_layout, decode_layout;
  bool own_memory{false};  ///< the decode engine brings one region of its own memory per layer
};

struct scene {
  shape what;
  std::string backend, mode;
  std::vector<std::string> sources{};  ///< the nodes of prefill, once there is a deployment
};

/// Each byte of a request's state in `slot`, for reading and writing.
template <class Visit>
void each_state_byte(engine& node, std::uint32_t slot, std::uint64_t seed, Visit visit) {
  for (std::size_t index = 0; index < node.layout().states.size(); ++index) {
    const auto& state = node.layout().states[index];
    auto* at = node.region(state.region)->data() + state.base + slot * state.slot_stride;
    for (std::uint64_t i = 0; i < state.slot_bytes; ++i)
      visit(at[i], static_cast<std::byte>(seed * 31 + index * 7 + i * 13 + (i >> 8)));
  }
}

int prefill_body(engine& node, line_channel& channel) {
  cache_bytes cache{node};
  listener events{node};
  const auto layers = static_cast<std::uint32_t>(node.layout().layers.size());
  channel.say("up");
  for (const std::string request : {"whole", "rest"}) {
    if (!channel.order()) return 0;
    const std::uint64_t seed = request == "whole" ? 11 : 12;
    auto blocks = node.allocate_blocks((tokens + 15) / 16);
    if (!blocks) return 1;
    auto send = node.send({request, blocks->blocks, source_slot, 0ms, 0});
    if (!send) return 2;
    constexpr std::uint32_t chunk = 37;
    for (std::uint32_t begin = 0; begin < tokens; begin += chunk) {
      const auto end = std::min(tokens, begin + chunk);
      for (std::uint32_t layer = 0; layer < layers; ++layer) {
        cache.fill(blocks->blocks, layer, layer + 1, begin, end, seed);
        (void)node.layers_ready(*send, layer, layer + 1, end);
      }
    }
    each_state_byte(node, source_slot, seed, [](std::byte& at, std::byte value) { at = value; });
    (void)node.seal(*send, tokens, {std::byte{1}, std::byte{2}});
    if (!events.unpinned(*send)) channel.say("no end");
    (void)node.free_blocks(blocks->owner, blocks->blocks);
    channel.say(events.of(*send).failed > 0 ? to_string(events.of(*send).why) : "done");
  }
  return 0;
}

/// Receives one request. Returns what is wrong with it, or "done".
std::string take(engine& node, listener& events, const scene& s, const std::string& request,
                 const std::vector<block_id>& blocks, std::uint32_t from, std::uint64_t seed) {
  const auto mode = transfer_mode_of(s.mode).value();
  auto asked = node.receive({request, s.sources, mode, tokens, from, blocks, destination_slot});
  if (!asked) return to_string(asked.error());
  cache_bytes cache{node};
  auto& t = events.of(*asked);
  // A layer that is reported is complete, from every rank, when it is reported.
  std::size_t looked_at = 0;
  std::size_t too_early = 0;
  const auto look = [&] {
    for (; looked_at < t.layers.size(); ++looked_at) {
      const auto& c = t.layers[looked_at];
      too_early += cache.differing_layers(blocks, c.layer_begin, c.layer_end, c.token_begin,
                                          c.token_end, seed);
    }
    return t.unpinned > 0;
  };
  if (!events.until(look)) return "no end";
  if (too_early > 0) return std::to_string(too_early) + " pieces were told before they were there";
  if (t.failed > 0) return to_string(t.why);
  if (t.done != 1) return "not one outcome";
  if (t.aux != std::vector<std::byte>{std::byte{1}, std::byte{2}})
    return "the engine's own data is wrong";
  std::vector<std::uint32_t> told(node.layout().layers.size(), from);
  for (const auto& slice : t.layers) {
    for (auto layer = slice.layer_begin; layer < slice.layer_end; ++layer) {
      if (told[layer] != slice.token_begin) return "layers were told out of order";
      told[layer] = slice.token_end;
    }
  }
  for (const auto end : told) {
    if (end != tokens) return "a layer was told up to " + std::to_string(end);
  }
  if (const auto wrong = cache.differing(blocks, from, tokens, seed); wrong != 0)
    return std::to_string(wrong) + " pieces differ";
  std::size_t wrong = 0;
  each_state_byte(node, destination_slot, seed,
                  [&](std::byte& at, std::byte value) { wrong += at != value; });
  if (wrong != 0) return std::to_string(wrong) + " bytes of the state differ";
  return "done";
}

int decode_body(const scene& s, engine& node, line_channel& channel) {
  cache_bytes cache{node};
  listener events{node};
  cache.poison();
  channel.say("up");
  std::vector<block_id> blocks;
  for (std::uint32_t i = 0; i < (tokens + 15) / 16; ++i)
    blocks.push_back(block_id{(i * 5 + 2) % 17});
  if (!s.what.own_memory) {
    auto all = node.allocate_blocks(17);
    if (!all) return 1;
  }
  if (!channel.order()) return 0;
  channel.say(take(node, events, s, "whole", blocks, 0, 11));
  if (!channel.order()) return 0;
  const auto layers = static_cast<std::uint32_t>(node.layout().layers.size());
  cache.poison();
  cache.fill(blocks, 0, layers, 0, prefix, 77);
  auto outcome = take(node, events, s, "rest", blocks, prefix, 12);
  if (outcome == "done" && cache.differing(blocks, 0, prefix, 77) != 0)
    outcome = "the prefix was touched";
  channel.say(outcome);
  (void)channel.order();
  return 0;
}

/// The deployment's model in regions of the engine's own, one per layer.
int decode_with_own_memory(const cluster& c, const scene& s, const std::string& name,
                           line_channel& channel) {
  cluster::quiet(name);
  const auto deployment = c.deployment();
  const auto& model = *deployment.model;
  kvcache::cache_shape shape;
  shape.layers = kvcache::attention_layers(model.layers, model.kv_heads, model.head_dim);
  shape.dtype = model.dtype;
  shape.block_tokens = model.block_tokens;
  shape.blocks = 17;
  if (model.state) {
    shape.states.push_back({"state", model.state->bytes, kvcache::state_sharding::replicated});
    shape.state_slots = model.state->slots;
  }
  auto layout = kvcache::make_layout(
      shape, {kvcache::block_order::layers_first, kvcache::kv_placement::separate,
              kvcache::block_inner::token_major, kvcache::region_use::per_layer});
  if (!layout) {
    channel.say(to_string(layout.error()));
    return 1;
  }
  std::vector<std::vector<std::byte>> memory;
  engine_options options;
  for (const auto size : kvcache::region_sizes(*layout)) memory.emplace_back(size);
  for (auto& one : memory) options.regions.emplace_back(one);
  options.layout = *layout;
  auto node = c.start(name, std::move(options));
  if (!node) return 2;
  const auto code = decode_body(s, *node, channel);
  node->stop();
  return code;
}

class hetero : public ::testing::TestWithParam<scene> {};

TEST_P(hetero, caches_get_every_byte_to_its_place) {
  auto s = GetParam();
  if (s.what.own_memory) {
    if (const auto why = why_engine_memory_does_not_move(s.backend)) GTEST_SKIP() << *why;
  }
  auto options = unhurried();
  options.backend = s.backend;
  options.mode = s.mode;
  options.model = s.what.model;
  options.prefill_tp = s.what.prefill_tp;
  options.decode_tp = s.what.decode_tp;
  options.prefill_layout = s.what.prefill_layout;
  options.decode_layout = s.what.decode_layout;
  options.prefill_pool = "2MiB";
  options.decode_pool = "2MiB";
  cluster c{options};
  std::vector<std::unique_ptr<forked>> prefills, decodes;
  s.sources = c.nodes_of("prefill");
  for (const auto& name : s.sources) prefills.push_back(c.spawn(name, prefill_body));
  for (const auto& name : c.nodes_of("decode")) {
    if (s.what.own_memory) {
      decodes.push_back(std::make_unique<forked>([&c, &s, name](line_channel& channel) {
        return decode_with_own_memory(c, s, name, channel);
      }));
    } else {
      decodes.push_back(c.spawn(name, [&s](engine& node, line_channel& channel) {
        return decode_body(s, node, channel);
      }));
    }
  }
  for (auto* side : {&prefills, &decodes}) {
    for (auto& child : *side) ASSERT_EQ(child->channel().hear().value_or("silence"), "up");
  }
  for (const auto* request : {"whole", "rest"}) {
    SCOPED_TRACE(request);
    for (auto& child : decodes) child->channel().say("go");
    for (std::size_t rank = prefills.size(); rank-- > 0;) {
      prefills[rank]->channel().say("go");
      if (rank == 1) std::this_thread::sleep_for(100ms);  // the first rank is the last to compute
    }
    for (auto* side : {&decodes, &prefills}) {
      for (auto& child : *side) EXPECT_EQ(child->channel().hear().value_or("silence"), "done");
    }
  }
}

std::vector<scene> scenes() {
  const std::string plain = "{layers: 3, kv_heads: 2, head_dim: 16, dtype: fp16, block_tokens: 16}";
  const std::string four = "{layers: 3, kv_heads: 4, head_dim: 16, dtype: bf16, block_tokens: 16}";
  const std::string latent = "{layers: 3, mla: {latent_dim: 40}, dtype: fp8, block_tokens: 16}";
  const std::string state =
      "{layers: 3, kv_heads: 2, head_dim: 16, dtype: fp16, block_tokens: 16, state: {bytes: 5000B, "
      "slots: 8}}";
  const std::vector<shape> shapes{
      {"tp_1_to_2", plain, 1, 2, {}, {}},
      {"tp_2_to_1", plain, 2, 1, {}, {}},
      {"tp_2_to_4_with_2_heads", plain, 2, 4, {}, {}},
      {"tp_4_to_2_with_2_heads", plain, 4, 2, {}, {}},
      {"tp_2_to_4_with_4_heads", four, 2, 4, {}, {}},
      {"blocks_first_to_layers_first", plain, 1, 1, "{order: blocks_first}",
       "{order: layers_first}"},
      {"layers_first_to_block_interleaved", plain, 1, 1, "{order: layers_first}",
       "{order: block_interleaved}"},
      {"together_to_separate", plain, 1, 1, "{kv: together}", "{kv: separate}"},
      {"token_major_to_head_major", plain, 1, 1, "{inner: token_major}", "{inner: head_major}"},
      {"head_major_tp_2_to_separate_blocks_first", four, 2, 1, "{inner: head_major}",
       "{order: blocks_first, kv: separate}"},
      {"mla", latent, 1, 1, {}, "{order: blocks_first}"},
      {"mla_tp_1_to_2", latent, 1, 2, {}, {}},
      {"mla_tp_2_to_1", latent, 2, 1, {}, {}},
      {"state", state, 1, 1, {}, {}},
      {"state_tp_2_to_1", state, 2, 1, {}, {}},
      {"state_tp_1_to_2", state, 1, 2, "{order: blocks_first}", {}},
      {"own_memory_per_layer", plain, 1, 1, {}, {}, true},
      {"own_memory_per_layer_with_state", state, 2, 1, {}, {}, true},
  };
  std::vector<scene> all;
  for (const auto& one : shapes) {
    for (const auto& backend : every_backend()) {
      for (const std::string mode : {"write", "read"}) {
        // Six nodes take an emulated machine several seconds, so each such shape runs in one mode
        // there.
        const bool large = one.prefill_tp + one.decode_tp >= 6;
        const auto* its_mode = one.prefill_tp < one.decode_tp ? "write" : "read";
        if (large && have_verbs() && mode != its_mode) continue;
        all.push_back({one, backend, mode, {}});
      }
    }
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(shapes, hetero, ::testing::ValuesIn(scenes()), [](const auto& test) {
  return test.param.what.name + "_" + test.param.backend + "_" + test.param.mode;
});

}  // namespace
}  // namespace troupe::testing
