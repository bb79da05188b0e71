#include "scenario.hpp"

#include <algorithm>
#include <bit>

namespace troupe::engine_fuzz {

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
  std::string name = is_aside(node) ? "aside" : is_prefill(node) ? "prefill" : "decode";
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

}  // namespace troupe::engine_fuzz
