#include "blocks.hpp"

#include <algorithm>
#include <span>
#include <utility>

#include "waiting.hpp"

namespace troupe::engine_fuzz {

cache_blocks::cache_blocks(const scenario& s, std::uint32_t node, engine& e, cache_model& model,
                           finder found, dice& d)
    : s_{s},
      node_{node},
      its_{s.side_of(node)},
      engine_{e},
      model_{model},
      found_{std::move(found)},
      dice_{d} {
  if (its_.pooled) return;
  for (std::uint32_t i = 0; i < its_.blocks; ++i) free_.push_back(block_id{i});
}

void cache_blocks::shuffle(std::vector<block_id>& blocks) {
  for (std::size_t i = blocks.size(); i > 1; --i)
    std::swap(blocks[i - 1], blocks[dice_.roll(0, static_cast<std::uint32_t>(i) - 1)]);
}

result<held_blocks> cache_blocks::try_take(std::uint32_t count) {
  held_blocks taken;
  if (its_.pooled) {
    auto got = engine_.allocate_blocks(count);
    if (!got) return fail(got.error());
    taken.owner = got->owner;
    taken.all = std::move(got->blocks);
    shuffle(taken.all);
    return taken;
  }
  if (count > free_.size()) return fail(errc::pool_exhausted, "the scenario has too few");
  shuffle(free_);
  taken.all.assign(free_.end() - count, free_.end());
  free_.resize(free_.size() - count);
  return taken;
}

held_blocks cache_blocks::take(std::uint32_t count, bool shares, const std::string& whose) {
  const auto shared = shares ? prefix_.all.size() : 0;
  auto taken = try_take(count - static_cast<std::uint32_t>(shared));
  if (!taken) {
    found_(whose + ": no blocks: " + to_string(taken.error()));
    return {};
  }
  if (shares) {
    taken->all.insert(taken->all.begin(), prefix_.all.begin(), prefix_.all.end());
    taken->shared = shared;
  }
  return std::move(*taken);
}

void cache_blocks::give_back(held_blocks& from, std::size_t count, const std::string& whose) {
  const auto own = from.own();
  const auto those = std::span{own}.first(count);
  from.freed += count;
  if (!its_.pooled) {
    free_.insert(free_.end(), those.begin(), those.end());
  } else if (from.owner && count > 0) {
    if (auto freed = engine_.free_blocks(*from.owner, those); !freed)
      found_(whose + ": its blocks are not taken back: " + to_string(freed.error()));
  }
}

void cache_blocks::give_back_prefix(held_blocks& from, std::size_t count,
                                    const std::string& whose) {
  const auto before = engine_.report().pool;
  give_back(from, count, whose);
  if (engine_.report().pool.blocks_quarantined > before.blocks_quarantined)
    found_(whose + ": the blocks of its prefix are pinned");
}

std::optional<lent_block> cache_blocks::lend() {
  auto taken = try_take(1);
  if (!taken || taken->all.empty()) return std::nullopt;
  const auto bytes = model_.longest_run(taken->all.front());
  return lent_block{bytes, [this, held = std::move(*taken)]() mutable {
                      model_.reuse(held.all, std::nullopt);
                      give_back(held, 1, "a value");
                    }};
}

// -- the prefix

bool cache_blocks::uses_prefix(const act& one) const {
  if (one.node != node_) return false;
  switch (one.what) {
    case act_kind::send: return round_->requests[one.request].shares;
    case act_kind::receive:
    case act_kind::receive_again:
    case act_kind::receive_late: return round_->requests[one.request].shared_there;
    default: return false;
  }
}

content cache_blocks::prefix_content() const {
  return {round_->shared_seed, round_->shared_seed, s_.shared_tokens(*round_)};
}

void cache_blocks::begin_round(const round& now) {
  round_ = &now;
  prefix_ = {};
  prefix_uses_ = static_cast<std::uint32_t>(
      std::ranges::count_if(now.acts, [this](const act& one) { return uses_prefix(one); }));
  if (prefix_uses_ == 0) return;
  prefix_ = take(now.shared_blocks, false, "the prefix");
  model_.compute(prefix_.all, model_.all_layers(), {0, s_.shared_tokens(now)}, prefix_content());
}

void cache_blocks::prefix_was_used() {
  if (--prefix_uses_ > 0 || !round_->shared_freed || !its_.pooled) return;
  if (s_.is_prefill(node_)) {
    // Sends read it.
    give_back(prefix_, prefix_.all.size(), "the prefix");
  } else {
    model_.reuse(prefix_.all, std::nullopt);
    give_back_prefix(prefix_, prefix_.all.size(), "the prefix");
  }
}

void cache_blocks::end_round() {
  if (prefix_.own().empty()) return;
  const auto wrong = model_.is_there(prefix_.all, model_.all_layers(),
                                     {0, s_.shared_tokens(*round_)}, prefix_content());
  if (!wrong.empty()) found_("the prefix that is shared: " + wrong);
  model_.reuse(prefix_.all, std::nullopt);
  give_back(prefix_, prefix_.all.size(), "the prefix");
}

std::string cache_blocks::what_is_missing() const {
  if (!its_.pooled) return {};
  actors::pool_report pool;
  const auto whole = [&] {
    if (its_.polling) (void)engine_.poll();
    pool = engine_.report().pool;
    return pool.blocks_free == pool.blocks_total && pool.blocks_quarantined == 0;
  };
  if (testing::comes_true(whole)) return {};
  return std::to_string(pool.blocks_free) + " of " + std::to_string(pool.blocks_total) +
         " blocks are free, " + std::to_string(pool.blocks_quarantined) + " in quarantine";
}

}  // namespace troupe::engine_fuzz
