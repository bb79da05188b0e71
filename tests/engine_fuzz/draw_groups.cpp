// Layers with block tables of their own, and what requests have of each.

#include <algorithm>

#include "drawing.hpp"

namespace troupe::engine_fuzz {

namespace {

std::uint32_t draw_block_tokens(std::uint32_t usual, dice& d) {
  const auto tokens = d.pick<std::uint32_t>(
      {usual, usual, 2 * usual, 3 * usual, usual % 2 == 0 ? usual / 2 : usual});
  return tokens <= kvcache::max_block_tokens ? tokens : usual;
}

/// Places each group over its own bytes, or over those of an earlier group.
std::vector<std::uint32_t> draw_pools(std::uint32_t groups, dice& d) {
  std::vector<std::uint32_t> pools;
  const bool all_apart = d.one_in(4);
  for (std::uint32_t g = 0; g < groups; ++g) {
    const bool apart = g == 0 || all_apart || d.one_in(4);
    pools.push_back(apart ? g : pools[d.roll(0, g - 1)]);
  }
  return pools;
}

/// The first token that the receiving side keeps: all, the last ones, or none.
std::uint32_t draw_kept(std::uint32_t tokens, std::uint32_t block_tokens, dice& d) {
  if (d.one_in(3)) return 0;
  if (d.one_in(12)) return (tokens + block_tokens - 1) / block_tokens * block_tokens;
  return (tokens - d.roll_log(1, tokens)) / block_tokens * block_tokens;
}

window draw_window(const request_plan& r, std::uint32_t block_tokens, dice& d) {
  window w;
  w.kept = w.asked = draw_kept(r.tokens, block_tokens, d);
  // The source need not have what decode already has.
  const auto most = std::max(w.kept, r.prefix) / block_tokens;
  w.held = d.one_in(2) ? w.kept : d.roll(0, most) * block_tokens;
  return w;
}

/// One rank asks for more than the source has of some group, and then for what it has.
void draw_short_window(const scenario& s, request_plan& r, dice& d) {
  const bool suits = r.what == mishap::none && !r.two_replicas && !r.asked_late;
  if (!suits || r.prefix == r.tokens || !d.one_in(2)) return;
  const auto first = d.roll(0, s.tables() - 1);
  for (std::uint32_t i = 0; i < s.tables(); ++i) {
    const auto t = (first + i) % s.tables();
    auto& w = r.windows[t];
    if (w.held <= r.prefix) continue;
    w.asked = d.roll(0, w.held / s.block_tokens(t) - 1) * s.block_tokens(t);
    r.what = mishap::short_window;
    r.rank = d.roll(0, static_cast<std::uint32_t>(s.takers_of(r).size()) - 1);
    r.decode_again = true;
    return;
  }
}

/// Puts this many tokens before the request that are kept nowhere, possibly more than there are
/// blocks.
void put_behind(request_plan& r, std::uint32_t tokens) {
  r.tokens += tokens;
  r.source_tokens += tokens;
  if (r.prefix > 0) r.prefix += tokens;
  for (auto& end : r.chunks) end += tokens;
  for (auto& w : r.windows) {
    w.held += tokens;
    w.kept += tokens;
    w.asked += tokens;
  }
}

/// Inserts a second receive behind the refused one.
void insert_second_receive(const scenario& s, round& now, std::uint32_t request) {
  const auto& r = now.requests[request];
  const auto node = s.takers_of(r)[r.rank];
  const auto first = std::ranges::find_if(now.acts, [&](const act& one) {
    return one.what == act_kind::receive && one.node == node && one.request == request;
  });
  now.acts.insert(first + 1, {act{act_kind::wait_for_outcome, node, request, node},
                              act{act_kind::receive_again, node, request}});
}

void insert_wrong_calls(const scenario& s, round& now, dice& d) {
  const auto count = d.roll(0, 3);
  for (std::uint32_t i = 0; i < count; ++i) {
    const act call{act_kind::call_wrongly, d.roll(0, s.joined_nodes() - 1), 0,
                   wrong_call_count + d.roll(0, wrong_group_call_count - 1)};
    const auto at = d.roll(0, static_cast<std::uint32_t>(now.acts.size()));
    now.acts.insert(now.acts.begin() + at, call);
  }
}

}  // namespace

void draw_groups(scenario& s) {
  auto d = dice_beside(s, 3);
  if (s.has_model() || !d.one_in(3)) return;
  std::vector<std::uint32_t> layers;  // that keep something of each token
  for (std::uint32_t l = 0; l < s.model.layers.size(); ++l)
    if (s.model.layers[l].kind != kvcache::layer_kind::recurrent) layers.push_back(l);
  const auto count = std::min(d.roll(1, 4), static_cast<std::uint32_t>(layers.size()));
  s.groups.resize(count);
  for (auto& group : s.groups) group.block_tokens = draw_block_tokens(s.model.block_tokens, d);
  const auto first = d.roll(0, count - 1);
  for (std::uint32_t i = 0; i < layers.size(); ++i) {
    // One layer in each group, the others anywhere.
    const auto group = i < count ? (first + i) % count : d.roll(0, count - 1);
    s.groups[group].layers.push_back(layers[i]);
  }
  for (auto* its : {&s.prefill, &s.decode, &s.aside}) its->pools = draw_pools(count, d);
  s.aside.blocks += count;
}

void draw_windows(const scenario& s, round& now, dice& d) {
  if (s.groups.empty()) return;
  for (std::uint32_t i = 0; i < now.requests.size(); ++i) {
    auto& r = now.requests[i];
    for (std::uint32_t t = 0; t < s.tables(); ++t)
      r.windows.push_back(draw_window(r, s.block_tokens(t), d));
    draw_short_window(s, r, d);
    if (!r.shares && d.one_in(6)) put_behind(r, s.tokens_of_whole_blocks() * d.roll(1, 40));
    if (r.what == mishap::short_window) insert_second_receive(s, now, i);
  }
  insert_wrong_calls(s, now, d);
}

}  // namespace troupe::engine_fuzz
