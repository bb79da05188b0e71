#include "troupe/deploy/cli/bench_slots.hpp"

#include <algorithm>
#include <random>

namespace troupe::deploy::cli {

result<bench_slots> bench_slots::create(engine& node, const bench_options& options) {
  const auto per_request = blocks_per_request(options);
  auto all = node.allocate_blocks(per_request * options.concurrency);
  if (!all) return fail(all.error());
  auto& ids = all->blocks;
  std::ranges::sort(ids);
  // A fixed seed: two runs of the same load move the same segments.
  if (!options.contiguous) std::ranges::shuffle(ids, std::mt19937_64{7});
  bench_slots made;
  made.layout_ = &node.layout();
  made.tokens_ = options.blocks == 0 ? options.tokens : options.blocks * options.block_tokens;
  for (std::size_t i = 0; i < kvcache::region_sizes(node.layout()).size(); ++i) {
    const auto region = node.region(i);
    if (!region) return fail(region.error());
    made.regions_.push_back(*region);
  }
  for (auto at = ids.begin(); at != ids.end(); at += per_request)
    made.slots_.emplace_back(at, at + per_request);
  return made;
}

}  // namespace troupe::deploy::cli
