#include "simulation_judge.hpp"

#include <algorithm>
#include <utility>
#include <variant>

namespace troupe::actors::simulation {

void judge::violate(const std::string& what) {
  if (violation_.empty()) violation_ = what + " (at " + std::to_string(course_.now) + " ms)";
}

// -- what a side does

void judge::posts(side by, const post_slice& what) {
  auto& s = course_.sides[by];
  if (s.fence_called) violate("a post behind the fence");
  if (s.refused) violate("a post where the peer has refused one");
  if (++s.posts != what.id.value) violate("batch ids do not count up");
  if (++s.in_flight > scenario_.max_in_flight) violate("more batches in flight than allowed");
  if ((scenario_.mode == transfer_mode::write) != (by == prefill)) violate("the wrong side posted");
  check_slice(what);
}

void judge::check_slice(const post_slice& what) {
  const auto& c = what.slice;
  const auto& s = scenario_;
  const bool state_only =
      c.layer_begin == c.layer_end && c.token_begin == c.token_end && what.state;
  if (what.state && (!s.has_state || !course_.sealed)) violate("state was posted before the seal");
  if (state_only) return;
  if (c.layer_begin >= c.layer_end || c.layer_end > s.layers || c.token_begin >= c.token_end ||
      c.token_begin < s.prefix || c.token_end > s.tokens) {
    return violate("a slice outside the request was posted");
  }
  if (s.layers_per_batch > 0 && c.layer_end - c.layer_begin > s.layers_per_batch) {
    violate("more layers in a batch than allowed");
  }
  for (auto layer = c.layer_begin; layer < c.layer_end; ++layer) {
    if (course_.ready[layer] < c.token_end) violate("tokens were posted before they were computed");
  }
}

void judge::sends(side from, const session_message& message, transfer_id expected) {
  auto& w = course_.sides[from];
  if (w.knows_link_is_lost) violate("a message was sent over a link known to be lost");
  if (std::holds_alternative<transfer_quiescent>(message)) ++w.answers;
  if (std::holds_alternative<transfer_release>(message)) {
    if (w.concluded == 0 || w.failure) violate("the source was released before all of it was here");
    course_.released = true;
  }
  if (route_of(message) != expected) violate("a message of another transfer");
}

void judge::fences(side by) {
  if (std::exchange(course_.sides[by].fence_called, true)) violate("a second fence");
}

void judge::offers(side by, const send_offer& what) {
  const auto& s = scenario_;
  if (by != prefill || course_.sides[by].fence_called || s.mode != transfer_mode::read ||
      course_.offered) {
    return violate("an offer that has no place");
  }
  if (what.slice != cache_slice{0, s.layers, s.prefix, s.tokens} || what.state != s.has_state ||
      !course_.sealed) {
    violate("an offer of something else than the request");
  }
  course_.offered = true;
}

void judge::tells(side by, const cache_slice& c) {
  if (by != decode || course_.sides[by].concluded > 0) {
    violate("layers were told where nobody listens");
  }
  if (c.layer_begin >= c.layer_end || c.layer_end > scenario_.layers ||
      c.token_begin >= c.token_end || c.token_end > scenario_.tokens) {
    return violate("layers were told that were not asked for");
  }
  for (auto layer = c.layer_begin; layer < c.layer_end; ++layer) {
    if (c.token_begin != std::max(course_.told[layer], scenario_.prefix)) {
      violate("layers were told out of order");
    }
    course_.told[layer] = c.token_end;
    for (auto token = c.token_begin; token < c.token_end; ++token) {
      if (!came(course_.landed[layer][token])) violate("a layer was told that is not here");
    }
  }
}

void judge::concludes(side by, const conclude& what) {
  auto& w = course_.sides[by];
  if (++w.concluded > 1) violate("a second outcome");
  w.failure = what.failure;
  const bool refused = what.failure && what.failure->code == errc::layout_mismatch;
  if (what.refused != refused) violate("whose the failure is, is not what was said");
  if (what.failure) return;
  if (w.must_fail) violate("done after the peer said that it failed");
  if (by == prefill) {
    if (!course_.released) violate("the prefill side was done before the release");
    return;
  }
  if (!w.quiescent_given) violate("the decode side was done before the fence");
  check_all_is_here(what);
}

void judge::check_all_is_here(const conclude& what) {
  const auto& s = scenario_;
  for (std::uint32_t layer = 0; layer < s.layers; ++layer) {
    for (std::uint32_t token = 0; token < s.tokens; ++token) {
      const auto times = course_.landed[layer][token];
      if (token >= s.prefix ? !came(times) : times != 0) {
        violate("the decode side was done with tokens missing or landed twice");
      }
    }
    if (!s.empty() && course_.told[layer] != s.tokens) {
      violate("the decode side was done with layers not told");
    }
  }
  if (s.has_state && !s.empty() ? !came(course_.state_landed) : course_.state_landed != 0) {
    violate("done without the state, or with two");
  }
  if (s.has(wrong_expect)) violate("done with another request than the decode side expects");
  if (what.aux != s.aux) {
    violate("what came with the seal is not what the engine sealed with");
  }
}

void judge::unpins(side by) {
  auto& w = course_.sides[by];
  if (w.concluded != 1) violate("an unpin before the outcome");
  if (w.fence_called ? !w.quiescent_given : w.posts > 0 || by == decode) {
    violate("an unpin before the transfer was quiescent");
  }
  w.unpinned = true;
}

// -- what happens to memory

void judge::touches_memory() {
  const auto& d = course_.sides[decode];
  if (d.unpinned) violate("bytes landed in blocks that were given back");
  if (d.concluded > 0 && !d.failure) {
    violate("bytes landed in blocks that the engine was told it owns");
  }
  if (course_.sides[prefill].unpinned) {
    violate("bytes were read from blocks that were given back");
  }
}

void judge::lands(const cache_slice& c, bool with_state) {
  touches_memory();
  for (auto layer = c.layer_begin; layer < c.layer_end; ++layer) {
    for (auto token = c.token_begin; token < c.token_end; ++token) ++course_.landed[layer][token];
  }
  if (with_state) ++course_.state_landed;
}

void judge::fails(side by, const error& why) {
  if (why.code == errc::grant_revoked) course_.sides[by].refused = true;
}

void judge::link_is_back(side at) {
  auto& w = course_.sides[at];
  w.knows_link = course_.link;
  w.link_gone = false;
  w.refused = false;
  w.in_flight = 0;
  if (at == prefill) course_.offered = false;
}

bool judge::came(std::uint32_t times) const {
  return times == 1 || (times > 1 && course_.link > 0);
}

// -- the end

void judge::comes_to_its_end(std::array<bool, 2> finished) {
  for (const auto s : {decode, prefill}) {
    const auto& w = course_.sides[s];
    if (!w.exists) continue;
    if (!finished[s] || w.concluded != 1 || !w.unpinned) {
      violate(std::string{s == decode ? "decode" : "prefill"} + " did not end");
    }
    check_answer(w);
    check_reason(w);
  }
}

void judge::check_answer(const watched& w) {
  if (w.answers > 1) violate("two answers to one abort");
  if (w.answers == 1 && !w.got_abort) violate("an answer to no abort");
  if (w.answers == 0 && w.got_abort && !w.knows_link_is_lost) violate("an abort was not answered");
}

/// Checks that the reason of a failure is a fault of this scenario.
void judge::check_reason(const watched& w) {
  if (!w.failure) return;
  const auto& s = scenario_;
  bool known = false;
  switch (w.failure->code) {
    case errc::aborted: known = s.has(decode_abort | prefill_abort); break;
    case errc::peer_lost:
    case errc::link_broken: known = s.has(link_loss); break;
    case errc::deadline: known = s.has(decode_deadline | prefill_deadline); break;
    case errc::overloaded: known = course_.refused; break;
    case errc::out_of_range: known = s.has(short_seal); break;
    case errc::invalid_config: known = s.has(unready_seal); break;
    case errc::layout_mismatch: known = s.has(wrong_expect); break;
    default: break;
  }
  if (!known) violate("failed for a reason that nobody gave: " + to_string(*w.failure));
}

void judge::agreement(report& into) {
  const auto& d = course_.sides[decode];
  const auto& p = course_.sides[prefill];
  if (d.exists && !d.failure) into.decode_done = true;
  if (d.failure) into.decode_failure = d.failure->code;
  if (p.exists && !p.failure) into.prefill_done = true;
  if (p.failure) into.prefill_failure = p.failure->code;
  if (into.decode_done && !into.prefill_done) {
    const bool excused = course_.broken || (p.failure && p.failure->code == errc::deadline) ||
                         p.engine_aborted || d.engine_aborted;
    if (!excused) violate("decode is done, prefill failed, and nothing of its own happened to it");
  }
  if (into.prefill_done && !into.decode_done) violate("prefill is done and decode failed");
  if ((scenario_.faults & ~link_rebuild) == 0 && !(into.decode_done && into.prefill_done)) {
    violate("nothing went wrong and yet it failed");
  }
}

}  // namespace troupe::actors::simulation
