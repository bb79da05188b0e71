#include "troupe/deploy/reference_engine/decode_request.hpp"

namespace troupe::reference {

void decode_request::note_landed(const actors::cache_slice& slice) {
  landing now_landed{clock_ns(), 0};
  for (std::uint32_t layer = slice.layer_begin; layer < slice.layer_end; ++layer) {
    if (layer >= landed.size()) landed.resize(layer + std::size_t{1}, times.prefix_tokens);
    if (slice.token_end <= landed[layer]) continue;
    now_landed.amount += slice.token_end - landed[layer];
    landed[layer] = slice.token_end;
  }
  landings.push_back(now_landed);
}

void decode_request::judge_overlap(std::int64_t computed_ns) {
  times.computed_ns = computed_ns;
  std::uint64_t all = 0;
  std::uint64_t early = 0;
  for (const auto& l : landings) {
    all += l.amount;
    if (l.at_ns < computed_ns) early += l.amount;
  }
  times.landed_early = all == 0 ? 0.0 : static_cast<double>(early) / static_cast<double>(all);
}

}  // namespace troupe::reference
