#include <algorithm>
#include <numeric>

#include "drawing.hpp"

namespace troupe::engine_fuzz {

namespace {

void draw_mishap(request_plan& r, const scenario& s, dice& d) {
  if (!d.one_in(3)) return;
  if (s.where == processes::several && d.one_in(2)) {
    r.what = d.pick(
        {mishap::prefill_dies, mishap::decode_dies, mishap::prefill_stands, mishap::decode_stands});
  } else {
    r.what = d.pick({mishap::decode_aborts, mishap::prefill_aborts, mishap::short_seal,
                     mishap::decode_deadline});
  }
  const bool of_prefill = r.what == mishap::prefill_aborts || r.what == mishap::prefill_dies ||
                          r.what == mishap::prefill_stands;
  r.rank = d.roll(0, (of_prefill != r.back ? s.prefill.ranks : s.decode.ranks) - 1);
}

/// Draws the tokens of a request, and how many of the first ones decode already has.
void draw_tokens(request_plan& r, const scenario& s, const round& in, std::uint32_t most_tokens,
                 dice& d) {
  r.tokens = d.roll_log(1, most_tokens);
  // In scenarios with long prompts, all of them are long.
  if (most_tokens > 20'000) r.tokens = d.roll(most_tokens / 2, most_tokens);
  if (d.one_in(4)) r.prefix = d.roll(0, r.tokens - 1);
  if (d.one_in(40)) r.prefix = r.tokens;
  const auto shared = s.shared_tokens(in);
  r.shares = shared > 0 && !d.one_in(4);
  if (r.shares && r.tokens <= shared) r.tokens = shared + d.roll(1, s.model.block_tokens + 1);
  r.shared_there = r.shares && !d.one_in(4);
  if (r.shared_there && r.prefix < shared) r.prefix = shared;
  r.source_tokens = r.tokens;
}

request_plan draw_request(const scenario& s, const round& in, std::uint32_t most_tokens, dice& d) {
  request_plan r;
  r.seed = d.next();
  r.back = s.is_mutual() && r.seed / 288 % 2 == 1;
  draw_tokens(r, s, in, most_tokens, d);
  if (d.one_in(3)) r.aux_bytes = d.one_in(10) ? 65'536 : d.roll_log(1, 4096);
  r.names_blocks = !s.decode.pooled || r.prefix > 0 || d.one_in(2);
  r.frees_early = d.one_in(3);
  r.two_replicas = s.decode.replicas > 1 && d.one_in(2) && !r.back;
  draw_mishap(r, s, d);
  if (r.what != mishap::none) r.two_replicas = false;
  if (r.what == mishap::short_seal) {
    const auto least = std::max(r.prefix + 1, r.shares ? s.shared_tokens(in) : 1);
    if (least >= r.tokens) {
      r.what = mishap::none;
    } else {
      r.source_tokens = d.roll(least, r.tokens - 1);
    }
  }
  // Only for failures that do not end the source.
  r.decode_again = s.retries && (r.what == mishap::decode_aborts ||
                                 r.what == mishap::decode_deadline || r.what == mishap::short_seal);
  r.asked_late = r.what == mishap::none && d.one_in(4);
  if (r.what == mishap::none && !r.two_replicas && r.seed / 1152 % 12 == 0) {
    r.what = mishap::released;
    r.asked_late = false;
  }
  if (!d.one_in(6)) {
    const auto chunks = d.roll(1, 4);
    for (std::uint32_t i = 1; i < chunks; ++i) r.chunks.push_back(d.roll(1, r.source_tokens));
    r.chunks.push_back(r.source_tokens);
    std::ranges::sort(r.chunks);
    r.chunks.erase(std::ranges::unique(r.chunks).begin(), r.chunks.end());
  }
  return r;
}

using story = std::vector<act>;

story prefill_story(const scenario& s, const request_plan& r, std::uint32_t node,
                    std::uint32_t index, dice& d) {
  story all{{act_kind::send, node, index}};
  const auto layers = static_cast<std::uint32_t>(s.model.layers.size());
  for (std::uint32_t chunk = 0; chunk < r.chunks.size(); ++chunk) {
    const auto step = d.roll(1, std::max(1U, layers / d.roll(1, 4)));
    story groups;
    for (std::uint32_t layer = 0; layer < layers; layer += step) {
      groups.push_back(
          {act_kind::compute, node, index, layer, std::min(layers, layer + step), chunk});
    }
    if (d.one_in(4)) std::ranges::reverse(groups);
    all.insert(all.end(), groups.begin(), groups.end());
  }
  all.push_back({act_kind::seal, node, index});
  return all;
}

/// The steps of one request, as a story for each node that takes part. Each story keeps its order.
std::vector<story> stories_of(const scenario& s, const request_plan& r, std::uint32_t index,
                              dice& d) {
  std::vector<story> all;
  const auto sources = s.sources_of(r);
  const auto takers = s.takers_of(r);
  for (const auto node : sources) all.push_back(prefill_story(s, r, node, index, d));
  if (r.what == mishap::released) {
    all.push_back({{act_kind::release, takers.front(), index}});
    return all;
  }
  for (std::uint32_t rank = 0; rank < takers.size(); ++rank) {
    const auto node = takers[rank];
    story its{{act_kind::receive, node, index}};
    if (r.decode_again && (r.what == mishap::short_seal || r.rank == rank)) {
      if (r.what == mishap::decode_aborts) its.push_back({act_kind::abort_receive, node, index});
      its.push_back({act_kind::wait_for_outcome, node, index, node});
      its.push_back({act_kind::receive_again, node, index});
    } else if (r.what == mishap::decode_aborts && r.rank == rank) {
      its.push_back({act_kind::pause, node, index, d.roll_log(1, 5000)});
      its.push_back({act_kind::abort_receive, node, index});
    }
    if (r.asked_late && rank == 0) {
      its.push_back({act_kind::wait_for_sends, node, index});
      its.push_back({act_kind::wait_for_outcome, node, index, node});
      its.push_back({act_kind::receive_late, node, index});
    }
    all.push_back(std::move(its));
    if (!r.two_replicas) continue;
    const auto second = s.decode_node(1, rank);
    story others;
    if (d.one_in(2)) others.push_back({act_kind::wait_for_outcome, second, index, node});
    others.push_back({act_kind::receive, second, index});
    all.push_back(std::move(others));
  }
  const auto happens = [&](act_kind what, std::uint32_t node) {
    // Anywhere in the story of that node, after its first step.
    for (auto& its : all) {
      if (its.front().node != node) continue;
      const auto at = d.roll(1, static_cast<std::uint32_t>(its.size()));
      its.insert(its.begin() + at, {what, node, index});
      return;
    }
  };
  if (r.what == mishap::prefill_aborts) happens(act_kind::abort_send, sources[r.rank]);
  if (r.what == mishap::prefill_dies) happens(act_kind::die, sources[r.rank]);
  if (r.what == mishap::decode_dies) happens(act_kind::die, takers[r.rank]);
  if (r.what == mishap::prefill_stands) happens(act_kind::stand, sources[r.rank]);
  if (r.what == mishap::decode_stands) happens(act_kind::stand, takers[r.rank]);
  return all;
}

/// Merges the steps of all stories into one order.
story merge(std::vector<story> stories, dice& d) {
  story all;
  // Some stories keep their turn for long, so that either side may be far ahead.
  const auto turn = d.pick<std::uint32_t>({1, 1, 3, 100});
  std::vector<std::size_t> at(stories.size(), 0);
  std::vector<std::size_t> left(stories.size());
  std::iota(left.begin(), left.end(), 0);
  while (!left.empty()) {
    const auto i = d.roll(0, static_cast<std::uint32_t>(left.size()) - 1);
    const auto which = left[i];
    for (std::uint32_t n = 0; n < turn && at[which] < stories[which].size(); ++n) {
      all.push_back(stories[which][at[which]]);
      ++at[which];
    }
    if (at[which] == stories[which].size()) left.erase(left.begin() + i);
    if (d.one_in(6)) all.push_back({act_kind::pause, 0, 0, d.roll_log(1, 4000)});
  }
  return all;
}

/// Inserts, for each held request, a hold somewhere before each receive at its node.
void insert_holds(const scenario& s, round& now, dice& d) {
  for (std::uint32_t i = 0; i < now.requests.size(); ++i) {
    const auto& r = now.requests[i];
    if (!r.is_held()) continue;
    for (const auto node : s.takers_of(r)) {
      const auto receive = std::ranges::find_if(now.acts, [&](const act& one) {
        return one.what == act_kind::receive && one.node == node && one.request == i;
      });
      const auto most = static_cast<std::uint32_t>(receive - now.acts.begin());
      now.acts.insert(now.acts.begin() + d.roll(0, most), {act_kind::hold, node, i});
    }
  }
}

bool kills(mishap what) {
  return what == mishap::prefill_dies || what == mishap::decode_dies ||
         what == mishap::prefill_stands || what == mishap::decode_stands;
}

put_plan draw_put(const scenario& s, dice& d) {
  put_plan put;
  put.seed = d.next();
  put.peer = d.roll(0, s.joined_nodes() - 1);
  put.bytes = d.one_in(6) ? 0 : d.roll_log(1, 2U << 20U);
  // Small values travel in a frame; large ones are read where they lie.
  if (d.one_in(3)) put.bytes = d.roll(33'000, 2U << 20U);
  put.memory = static_cast<value_memory>(d.roll(0, 2));
  put.end = static_cast<memory_end>(d.roll(0, 2));
  put.when = d.one_in(2) ? static_cast<given_up>(d.roll(1, 2)) : given_up::never;
  put.soon_us = d.roll_log(1, 3000);
  if (d.one_in(4)) put.ttl_ms = d.roll_log(2, 3000);
  put.again = d.one_in(2);
  return put;
}

}  // namespace

round draw_round(scenario& s, std::uint32_t most_tokens, bool last, dice& d) {
  round made;
  const auto count = d.pick<std::uint32_t>({1, 1, 2, 3, 4});
  const auto most_each = std::clamp(most_tokens / count, 1U, most_tokens_ever);
  made.shared_seed = d.next();
  made.shared_freed = d.one_in(2);
  if (count > 1 && d.one_in(2)) {
    made.shared_blocks = d.roll(1, std::max(1U, most_each / s.model.block_tokens / 2));
    // The shared prefix consists of whole blocks of each group of layers.
    const auto whole = s.tokens_of_whole_blocks() / s.model.block_tokens;
    made.shared_blocks = (made.shared_blocks + whole - 1) / whole * whole;
  }
  std::vector<story> stories;
  bool killed = false;
  for (std::uint32_t index = 0; index < count; ++index) {
    auto r = draw_request(s, made, most_each, d);
    // Kills or stops only one process, in the last round, since no successor is started.
    if (kills(r.what) && (killed || !last)) {
      r.what = mishap::none;
      r.rank = 0;
    }
    killed |= kills(r.what);
    r.slot = index;
    for (auto& one : stories_of(s, r, index, d)) stories.push_back(std::move(one));
    made.requests.push_back(std::move(r));
  }
  s.may_freeze |= killed;
  const auto some_node = [&] { return d.roll(0, s.nodes() - 1); };
  const auto extras = d.roll(0, 4);
  for (std::uint32_t i = 0; i < extras; ++i)
    stories.push_back({{act_kind::call_wrongly, some_node(), 0, d.roll(0, wrong_call_count - 1)}});
  auto beside = dice_beside(s, 5);
  auto& of_puts = killed ? beside : d;
  const auto puts = of_puts.pick<std::uint32_t>({0, 0, 1, 2, 3, 6});
  for (std::uint32_t i = 0; i < puts; ++i) {
    made.puts.push_back(draw_put(s, of_puts));
    stories.push_back({{act_kind::put, of_puts.roll(0, s.joined_nodes() - 1), 0, i}});
  }
  if (s.may_break && !killed && d.one_in(2)) stories.push_back({{act_kind::break_links, 0}});
  made.acts = merge(std::move(stories), d);
  auto of_holds = dice{made.shared_seed};
  insert_holds(s, made, of_holds);
  for (const auto& r : made.requests) {
    if (r.what != mishap::prefill_stands && r.what != mishap::decode_stands) continue;
    for (const auto& one : made.acts) {
      if (one.what != act_kind::stand) continue;
      made.acts.push_back({act_kind::wake, one.node});
      break;
    }
  }
  return made;
}

}  // namespace troupe::engine_fuzz
