#include <algorithm>
#include <map>

#include "troupe/kvcache/plan.hpp"

namespace troupe::kvcache {
namespace {

using segments_by_region = std::map<std::uint32_t, std::vector<segment>>;

void gather(segments_by_region& all, const transfer_plan& plan) {
  for (const auto& piece : plan.pieces) {
    auto& segments = all[piece.local_region];
    segments.insert(segments.end(), piece.segments.begin(), piece.segments.end());
  }
}

}  // namespace

// A plan from the layout to itself names each byte of the blocks once: its local sides are the
// extents.
result<std::vector<region_extents>> granted_extents(const transfer_geometry& itself,
                                                    std::span<const block_id> blocks,
                                                    std::optional<std::uint32_t> state_slot) {
  std::vector<block_id> sorted{blocks.begin(), blocks.end()};
  std::sort(sorted.begin(), sorted.end());
  sorted.erase(std::unique(sorted.begin(), sorted.end()), sorted.end());

  segments_by_region all;
  const token_range tokens{0, std::uint64_t{sorted.size()} * itself.block_tokens()};
  auto planned = itself.plan({0, itself.layers()}, tokens, sorted, sorted);
  if (!planned) return fail(planned.error());
  gather(all, *planned);
  if (state_slot) {
    auto state = itself.plan_state(*state_slot, *state_slot);
    if (!state) return fail(state.error());
    gather(all, *state);
  }

  std::vector<region_extents> granted;
  for (auto& [region, segments] : all) {
    std::sort(segments.begin(), segments.end(),
              [](const segment& a, const segment& b) { return a.local_offset < b.local_offset; });
    granted.push_back({region, {}});
    for (const auto& s : merge_segments(segments)) {
      granted.back().extents.push_back({s.local_offset, s.length, s.local_stride, s.count});
    }
  }
  return granted;
}

}  // namespace troupe::kvcache
