#include "simulation_scenario.hpp"

#include <algorithm>

namespace troupe::actors::simulation {

void timeline::schedule(std::uint32_t time, kind what, side where, std::uint32_t index) {
  queue_.push_back({time, order_++, what, where, index});
  std::push_heap(queue_.begin(), queue_.end());
}

event timeline::take() {
  std::pop_heap(queue_.begin(), queue_.end());
  const auto next = queue_.back();
  queue_.pop_back();
  return next;
}

namespace {

void draw_faults(scenario& s, dice& d) {
  if (!d.one_in(3)) s.faults |= 1u << d.upto(8);
  if (d.one_in(4)) s.faults |= 1u << d.upto(5);
  if (d.one_in(3)) s.faults |= link_rebuild;
  if (d.one_in(16)) s.faults |= wrong_expect;
  if (s.has(never_seals)) s.faults |= d.one_in(2) ? decode_deadline : prefill_deadline;
  if (s.has(short_seal) && s.tokens == 0) s.faults &= ~short_seal;
  if (s.has(unready_seal) && s.source_tokens == 0) s.faults &= ~unready_seal;
}

/// Draws the engine's progress, chunk by chunk, each chunk in random groups of layers. Returns the
/// time of the last one.
std::uint32_t draw_chunks(scenario& s, dice& d, timeline& into) {
  std::uint32_t time = d.upto(15);
  std::uint32_t token = 0;
  auto end_of_all = s.source_tokens;
  if (s.has(short_seal)) end_of_all = d.upto(s.tokens - 1);
  s.seal_tokens = end_of_all;
  const auto skipped = s.has(unready_seal) ? d.upto(s.layers - 1) : s.layers;
  if (s.has(unready_seal) && end_of_all == 0) s.faults &= ~unready_seal;
  while (token < end_of_all) {
    const bool whole = d.one_in(3);
    token = whole ? end_of_all : token + 1 + d.upto(end_of_all - token - 1);
    for (std::uint32_t layer = 0; layer < s.layers;) {
      const auto end = layer + 1 + d.upto(s.layers - layer - 1);
      time += d.upto(6);
      // The skipped layer never reaches its last token.
      const bool hole = token == end_of_all && layer <= skipped && skipped < end;
      if (!hole) {
        into.schedule(time, kind::source_ready, prefill,
                      static_cast<std::uint32_t>(s.chunks.size()));
        s.chunks.push_back({layer, end, token});
      }
      layer = end;
    }
  }
  return time;
}

void draw_deadline(scenario& s, side of, bool may_pass, dice& d, timeline& into) {
  if (!may_pass) {
    // An early timer event must have no effect.
    if (d.one_in(4)) into.schedule(d.upto(60), kind::expire, of, 0);
    return;
  }
  const auto deadline = d.upto(120);
  s.deadlines[of] = deadline;
  if (deadline > 0) into.schedule(deadline - 1, kind::expire, of, 0);
  into.schedule(deadline, kind::expire, of, 0);
  into.schedule(deadline + 20, kind::expire, of, 0);
}

}  // namespace

scenario draw(dice& d, timeline& into) {
  scenario s;
  s.layers = 1 + d.upto(most_layers - 1);
  s.tokens = d.upto(most_tokens);
  s.prefix = d.one_in(3) ? d.upto(s.tokens) : 0;
  s.source_tokens = s.tokens + (d.one_in(4) ? d.upto(3) : 0);
  s.mode = d.one_in(3) ? transfer_mode::read : transfer_mode::write;
  s.layers_per_batch = d.upto(3);
  s.max_in_flight = 1 + d.upto(3);
  s.has_state = d.one_in(3);
  s.sync_fence = d.one_in(3);
  s.slow_fence = d.one_in(8);
  s.latency = 1 + d.upto(12);
  s.aux.assign(d.upto(3), std::byte{0xA5});
  draw_faults(s, d);
  s.expect.assign(s.aux.begin(), s.aux.begin() + d.upto(static_cast<std::uint32_t>(s.aux.size())));
  if (s.has(wrong_expect)) s.expect.push_back(std::byte{0x5A});

  into.schedule(d.upto(20), kind::start, decode, 0);
  const auto last = draw_chunks(s, d, into);
  if (!s.has(never_seals)) into.schedule(last + d.upto(5), kind::seal, prefill, 0);
  if (s.has(decode_abort)) into.schedule(d.upto(90), kind::engine_abort, decode, 0);
  if (s.has(prefill_abort)) into.schedule(d.upto(90), kind::engine_abort, prefill, 0);
  if (s.has(link_loss)) into.schedule(d.upto(90), kind::link_breaks, decode, 0);
  if (s.has(link_rebuild)) {
    const auto times = 1 + d.upto(2);
    for (std::uint32_t i = 0; i < times; ++i) {
      // also while the last batches after the seal are in flight
      into.schedule(d.one_in(2) ? last + d.upto(40) : d.upto(90), kind::link_swaps, decode, 0);
    }
  }
  draw_deadline(s, decode, s.has(decode_deadline), d, into);
  draw_deadline(s, prefill, s.has(prefill_deadline), d, into);
  if (s.has(post_refused)) s.refuse_post = 1 + d.upto(3);
  return s;
}

std::string describe_faults(std::uint32_t faults) {
  static constexpr std::array<const char*, 11> names{
      "decode_abort",     "prefill_abort", "link_loss",   "decode_deadline",
      "prefill_deadline", "post_refused",  "never_seals", "short_seal",
      "unready_seal",     "link_rebuild",  "wrong_expect"};
  std::string text;
  for (std::size_t i = 0; i < names.size(); ++i) {
    if ((faults & (1u << i)) == 0) continue;
    if (!text.empty()) text += " + ";
    text += names[i];
  }
  return text.empty() ? "no fault" : text;
}

}  // namespace troupe::actors::simulation
