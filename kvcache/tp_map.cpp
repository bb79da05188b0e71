#include "troupe/kvcache/tp_map.hpp"

#include <algorithm>
#include <set>

#include "troupe/kvcache/plan.hpp"

namespace troupe::kvcache {
namespace {

std::uint32_t divide_up(std::uint64_t a, std::uint64_t b) noexcept {
  return static_cast<std::uint32_t>((a + b - 1) / b);
}

/// The properties of a model that decide which ranks exchange data, each once.
struct spread {
  std::set<std::uint32_t> head_counts;
  bool sliced{false};
};

spread spread_of(const cache_layout& shape) {
  spread result;
  for (const auto& layer : shape.layers) {
    switch (layer.shape.kind) {
      case layer_kind::attention: result.head_counts.insert(layer.shape.kv_heads); break;
      case layer_kind::mla: result.head_counts.insert(1); break;
      case layer_kind::opaque:
        result.head_counts.insert(layer.shape.unit == opaque_unit::block_head ? layer.shape.kv_heads
                                                                              : 1);
        break;
      case layer_kind::recurrent: break;
    }
  }
  for (const auto& state : shape.states) {
    for (const auto& part : parts_of(state)) {
      if (part.sharding == state_sharding::sliced) {
        result.sliced = true;
      } else {
        result.head_counts.insert(1);
      }
    }
  }
  return result;
}

bool talks(const spread& model, const rank_pair& ranks) {
  if (model.sliced && slices_meet(ranks)) return true;
  return std::any_of(model.head_counts.begin(), model.head_counts.end(),
                     [&](std::uint32_t heads) { return heads_to_send(heads, ranks).count() > 0; });
}

}  // namespace

rank_span holders_of(std::uint32_t heads, std::uint32_t ranks, std::uint32_t head) noexcept {
  if (head >= heads || ranks == 0) return {};
  if (ranks > heads) {
    return {divide_up(std::uint64_t{head} * ranks, heads),
            divide_up((std::uint64_t{head} + 1) * ranks, heads)};
  }
  const auto rank = static_cast<std::uint32_t>(((std::uint64_t{head} + 1) * ranks - 1) / heads);
  return {rank, rank + 1};
}

head_span heads_to_send(std::uint32_t heads, const rank_pair& ranks) noexcept {
  const head_span held = head_range(heads, ranks.source_ranks, ranks.source);
  const head_span wanted = head_range(heads, ranks.destination_ranks, ranks.destination);
  const head_span common{std::max(held.begin, wanted.begin), std::min(held.end, wanted.end)};
  if (common.begin >= common.end) return {};
  if (ranks.source_ranks <= heads) return common;  // nobody else holds them
  const rank_span sources = holders_of(heads, ranks.source_ranks, common.begin);
  const rank_span takers = holders_of(heads, ranks.destination_ranks, common.begin);
  const std::uint64_t number = ranks.destination - takers.begin;
  const std::uint64_t designated = sources.begin + number * sources.count() / takers.count();
  return designated == ranks.source ? common : head_span{};
}

bool slices_meet(const rank_pair& ranks) noexcept {
  const std::uint64_t source = ranks.source;
  const std::uint64_t destination = ranks.destination;
  return source < ranks.source_ranks && destination < ranks.destination_ranks &&
         source * ranks.destination_ranks < (destination + 1) * ranks.source_ranks &&
         destination * ranks.source_ranks < (source + 1) * ranks.destination_ranks;
}

std::vector<std::uint32_t> sources_for(const cache_layout& shape, std::uint32_t prefill_ranks,
                                       std::uint32_t decode_ranks, std::uint32_t decode_rank) {
  const spread model = spread_of(shape);
  std::vector<std::uint32_t> sources;
  for (std::uint32_t rank = 0; rank < prefill_ranks; ++rank) {
    if (talks(model, {prefill_ranks, rank, decode_ranks, decode_rank})) sources.push_back(rank);
  }
  return sources;
}

std::vector<std::uint32_t> targets_for(const cache_layout& shape, std::uint32_t prefill_ranks,
                                       std::uint32_t decode_ranks, std::uint32_t prefill_rank) {
  const spread model = spread_of(shape);
  std::vector<std::uint32_t> targets;
  for (std::uint32_t rank = 0; rank < decode_ranks; ++rank) {
    if (talks(model, {prefill_ranks, prefill_rank, decode_ranks, rank})) targets.push_back(rank);
  }
  return targets;
}

}  // namespace troupe::kvcache
