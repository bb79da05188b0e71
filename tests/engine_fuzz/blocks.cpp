#include "blocks.hpp"

#include <algorithm>
#include <memory>
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
  free_.resize(s_.tables());
  for (auto& pool : free_)
    for (std::uint32_t i = 0; i < its_.blocks; ++i) pool.push_back(block_id{i});
}

void cache_blocks::shuffle(std::vector<block_id>& blocks) {
  for (std::size_t i = blocks.size(); i > 1; --i)
    std::swap(blocks[i - 1], blocks[dice_.roll(0, static_cast<std::uint32_t>(i) - 1)]);
}

result<kvcache::allocation> cache_blocks::try_take(std::uint32_t table, std::size_t count) {
  if (its_.pooled) {
    auto got = engine_.allocate_blocks(static_cast<std::uint32_t>(count));
    if (got) shuffle(got->blocks);
    return got;
  }
  auto& pool = free_[pool_of(table)];
  if (count > pool.size()) return fail(errc::pool_exhausted, "the scenario has too few");
  shuffle(pool);
  const auto first = pool.end() - static_cast<std::ptrdiff_t>(count);
  kvcache::allocation taken;
  taken.blocks.assign(first, pool.end());
  pool.erase(first, pool.end());
  return taken;
}

held_blocks cache_blocks::take(const std::vector<token_span>& tokens, bool shares,
                               const std::string& whose) {
  held_blocks taken;
  for (std::uint32_t t = 0; t < tokens.size(); ++t) {
    const std::size_t first = tokens[t].begin / s_.block_tokens(t);
    const std::size_t end = std::max<std::size_t>(first, s_.blocks_of(tokens[t].end, t));
    group_blocks of{tokens[t].begin, {}};
    if (shares && t < prefix_.tables.size()) {
      const auto& there = prefix_.tables[t].blocks;
      for (auto number = first; number < std::min(end, there.size()); ++number)
        of.blocks.push_back(there[number]);
    }
    taken.passed.push_back(of.blocks.size());
    auto more = try_take(t, end - first - of.blocks.size());
    if (!more) {
      found_(whose + ": no blocks: " + to_string(more.error()));
      return {};
    }
    if (its_.pooled) taken.owner = more->owner;
    of.blocks.insert(of.blocks.end(), more->blocks.begin(), more->blocks.end());
    taken.tables.push_back(std::move(of));
  }
  return taken;
}

block_tables cache_blocks::own(const held_blocks& of) const {
  auto tables = of.tables;
  for (std::uint32_t t = 0; t < tables.size(); ++t) {
    auto& blocks = tables[t].blocks;
    blocks.erase(blocks.begin(), blocks.begin() + static_cast<std::ptrdiff_t>(of.passed[t]));
    tables[t].first_token += static_cast<std::uint32_t>(of.passed[t]) * s_.block_tokens(t);
  }
  return tables;
}

void cache_blocks::free_some(held_blocks& from, std::uint32_t table, std::size_t count,
                             const std::string& whose) {
  const auto those = std::span{from.tables[table].blocks}.subspan(from.passed[table], count);
  from.passed[table] += count;
  if (!its_.pooled) {
    auto& pool = free_[pool_of(table)];
    pool.insert(pool.end(), those.begin(), those.end());
  } else if (from.owner && count > 0) {
    if (auto freed = engine_.free_blocks(*from.owner, those); !freed)
      found_(whose + ": its blocks are not taken back: " + to_string(freed.error()));
  }
}

void cache_blocks::give_back(held_blocks& from, const std::string& whose) {
  for (std::uint32_t t = 0; t < from.tables.size(); ++t)
    free_some(from, t, from.tables[t].blocks.size() - from.passed[t], whose);
}

void cache_blocks::give_back_prefix(held_blocks& from, std::size_t count,
                                    const std::string& whose) {
  const auto before = engine_.report().pool;
  free_some(from, 0, count, whose);
  if (engine_.report().pool.blocks_quarantined > before.blocks_quarantined)
    found_(whose + ": the blocks of its prefix are pinned");
}

std::optional<lent_block> cache_blocks::lend() {
  const auto table = s_.table_of(0);  // of the layer that values are put from
  auto taken = try_take(table, 1);
  if (!taken || taken->blocks.empty()) return std::nullopt;
  const auto bytes = model_.longest_run(taken->blocks.front());
  const auto held = std::make_shared<held_blocks>();
  const auto hold = [this, held, table](kvcache::allocation blocks) {
    held->tables.assign(s_.tables(), {});
    held->passed.assign(s_.tables(), 0);
    held->tables[table].blocks = std::move(blocks.blocks);
    if (its_.pooled) held->owner = blocks.owner;
  };
  hold(std::move(*taken));
  lent_block lent{bytes,
                  [this, held] {
                    model_.reuse(held->tables, std::nullopt);
                    give_back(*held, "a value");
                  },
                  {}};
  if (!its_.pooled) return lent;
  lent.swap = [this, held, hold, table] {
    give_back(*held, "a value");
    hold(try_take(table, 1).value_or(kvcache::allocation{}));
    model_.reuse(held->tables, std::nullopt);
  };
  return lent;
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
  const token_span tokens{0, s_.shared_tokens(now)};
  prefix_ = take(std::vector<token_span>(s_.tables(), tokens), false, "the prefix");
  model_.compute(prefix_.tables, model_.all_layers(), tokens, prefix_content(), true);
}

void cache_blocks::prefix_was_used() {
  if (--prefix_uses_ > 0 || !round_->shared_freed || !its_.pooled) return;
  if (prefix_.tables.empty()) return;
  if (s_.is_prefill(node_)) {
    // Sends read the prefix.
    give_back(prefix_, "the prefix");
  } else {
    model_.reuse(prefix_.tables, std::nullopt);
    give_back_prefix(prefix_, prefix_.tables.front().blocks.size(), "the prefix");
  }
}

void cache_blocks::end_round() {
  if (count_of(own(prefix_)) == 0) return;
  const auto wrong = model_.is_there(prefix_.tables, model_.all_layers(),
                                     {0, s_.shared_tokens(*round_)}, prefix_content());
  if (!wrong.empty()) found_("the prefix that is shared: " + wrong);
  model_.reuse(prefix_.tables, std::nullopt);
  give_back(prefix_, "the prefix");
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
