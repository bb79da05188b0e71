#include "scenario.hpp"

#include <algorithm>
#include <bit>
#include <numeric>

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

std::string scenario::stage_of(std::uint32_t node) const {
  if (is_aside(node)) return "aside";
  if (is_mutual()) return "engines";
  return is_prefill(node) ? "prefill" : "decode";
}

std::string scenario::replica_name_of(std::uint32_t node) const {
  return (is_prefill(node) ? "p" : "d") + std::to_string(replica_of(node));
}

std::string scenario::name_of(std::uint32_t node) const {
  const auto& its = side_of(node);
  if (is_open() && !is_aside(node)) {
    return stage_of(node) + "." + replica_name_of(node) + "." + std::to_string(rank_of(node));
  }
  auto name = stage_of(node) + "-" + std::to_string(replica_of(node));
  if (its.ranks > 1) name += "-tp" + std::to_string(rank_of(node));
  return name;
}

namespace {

std::vector<std::uint32_t> nodes_from(std::uint32_t first, std::uint32_t count) {
  std::vector<std::uint32_t> nodes(count);
  std::iota(nodes.begin(), nodes.end(), first);
  return nodes;
}

}  // namespace

std::vector<std::uint32_t> scenario::sources_of(const request_plan& r) const {
  if (r.back) return nodes_from(decode_node(decode_replica_of(r), 0), decode.ranks);
  return nodes_from(0, prefill.ranks);
}

std::vector<std::uint32_t> scenario::takers_of(const request_plan& r) const {
  if (r.back) return nodes_from(0, prefill.ranks);
  return nodes_from(decode_node(decode_replica_of(r), 0), decode.ranks);
}

std::uint32_t scenario::table_of(std::uint32_t layer) const {
  for (std::uint32_t t = 0; t < groups.size(); ++t) {
    if (std::ranges::find(groups[t].layers, layer) != groups[t].layers.end()) return t;
  }
  return 0;
}

std::uint32_t scenario::tokens_of_whole_blocks() const {
  auto tokens = model.block_tokens;
  for (std::uint32_t t = 0; t < tables(); ++t) tokens = std::lcm(tokens, block_tokens(t));
  return tokens;
}

}  // namespace troupe::engine_fuzz
