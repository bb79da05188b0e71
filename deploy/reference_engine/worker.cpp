#include "troupe/deploy/reference_engine/worker.hpp"

#include <algorithm>
#include <utility>

namespace troupe::reference {

slot_pool::slot_pool(const kvcache::cache_layout& layout) : in_use_{!layout.states.empty()} {
  if (!in_use_) return;
  std::uint32_t count = layout.states.front().slots;
  for (const auto& state : layout.states) count = std::min(count, state.slots);
  for (std::uint32_t slot = count; slot > 0; --slot) free_.push_back(slot - 1);
}

std::optional<std::uint32_t> slot_pool::take() {
  if (!in_use_ || free_.empty()) return std::nullopt;
  const std::uint32_t slot = free_.back();
  free_.pop_back();
  return slot;
}

void slot_pool::give_back(std::optional<std::uint32_t> slot) {
  if (slot) free_.push_back(*slot);
}

result<void> worker_context::check_fits(std::size_t tokens) const {
  if (blocks_for(tokens) <= layout().blocks) return {};
  return fail(errc::pool_exhausted,
              std::to_string(tokens) + " tokens need " + std::to_string(blocks_for(tokens)) +
                  " blocks and the pool of " + name + " has " + std::to_string(layout().blocks) +
                  "; give its stage a larger pool.size");
}

result<paged_cache> worker_context::private_part(std::size_t tokens, std::uint32_t rank,
                                                 std::uint32_t ranks) const {
  const auto count = static_cast<std::uint32_t>(blocks_for(tokens));
  auto shape =
      cache_shape_of(model->config(), layout().dtype, layout().block_tokens, count, 1, rank, ranks);
  for (std::size_t i = 0; i < shape.states.size(); ++i) {
    shape.states[i].name = layout().states[i].name;
    if (layout().states[i].sharding != kvcache::state_sharding::sliced) continue;
    shape.states[i].sharding = kvcache::state_sharding::sliced;
    shape.states[i].bytes /= ranks;
  }
  auto made = kvcache::make_layout(shape, {});
  if (!made) return fail(made.error());
  auto own = cache_memory::allocate(std::move(*made));
  if (!own) return fail(own.error());
  std::vector<block_id> all;
  for (std::uint32_t i = 0; i < count; ++i) all.push_back(block_id{i});
  return paged_cache::create(std::move(*own), std::move(all), 0);
}

}  // namespace troupe::reference
