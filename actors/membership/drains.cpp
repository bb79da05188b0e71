#include "troupe/actors/membership/drains.hpp"

#include <algorithm>

#include "troupe/actors/base/phrases.hpp"

namespace troupe::actors {

namespace {

constexpr std::uint32_t quiet_beats_needed = 2;

/// Describes what is left to do. Requests that only the router still counts may have ended untold.
std::string live_text(std::uint64_t unfinished, std::uint64_t queue, std::uint64_t transfers) {
  std::string live;
  const auto add = [&](const std::string& what) { live += (live.empty() ? "" : ", ") + what; };
  if (unfinished != 0)
    add(count_of(unfinished, "placed request") + " whose end has not been reported");
  if (queue != 0) add(std::to_string(queue) + " in its queue");
  if (transfers != 0) add(count_of(transfers, "transfer"));
  return live.empty() ? "nothing known is live, its next heartbeats must confirm it" : live;
}

}  // namespace

void drain_list::begin(std::string_view stage, std::uint32_t replica,
                       const std::vector<rank>& ranks, std::chrono::milliseconds deadline,
                       std::uint64_t epoch, steady_time now) {
  auto e = std::ranges::find_if(
      entries_, [&](const entry& x) { return x.stage == stage && x.replica == replica; });
  if (e == entries_.end()) e = entries_.insert(entries_.end(), entry{});
  e->stage = stage;
  e->replica = replica;
  if (e->cancelled) e->ranks.clear();
  for (const rank& r : ranks) {
    std::erase_if(e->ranks, [&](const draining_rank& x) { return x.who.name == r.name; });
    e->ranks.push_back({r, false, 0, {}});
  }
  e->patience = std::min(deadline, max_drain_deadline);
  e->deadline = now + e->patience;
  e->epoch = epoch;
  e->leaves = e->cancelled = false;
  e->news = true;
}

void drain_list::cancel(std::string_view stage, std::uint32_t replica) {
  for (entry& e : entries_) {
    if (e.stage == stage && e.replica == replica && !e.leaves) e.cancelled = true;
  }
}

void drain_list::heard(const heartbeat& beat) {
  entry* e = nullptr;
  draining_rank* r = find(beat.name, beat.incarnation, &e);
  if (r == nullptr) return;
  const bool quiet = beat.load.queue_length == 0 && beat.load.active_transfers == 0;
  if (!quiet) r->quiet_beats = 0;
  if (quiet && beat.epoch >= e->epoch) ++r->quiet_beats;
  r->load = beat.load;
  e->news = true;
}

void drain_list::lost(std::string_view name, std::uint64_t incarnation) {
  entry* e = nullptr;
  draining_rank* r = find(name, incarnation, &e);
  if (r == nullptr) return;
  r->lost = true;
  e->news = true;
}

std::optional<drain_order> drain_list::registered(std::string_view name,
                                                  std::uint64_t incarnation) {
  entry* e = nullptr;
  if (draining_rank* r = find(name, incarnation, &e); r != nullptr) {
    r->lost = false;
    r->quiet_beats = 0;
    const auto step = e->cancelled ? drain_step::resume
                      : e->leaves  ? drain_step::leave
                                   : drain_step::finish;
    return drain_order{incarnation, step};
  }
  forgotten(name);
  return std::nullopt;
}

std::string drain_list::why_it_leaves(std::string_view name) const {
  const auto of = std::ranges::find_if(entries_, [&](const entry& e) {
    return e.leaves &&
           std::ranges::any_of(e.ranks, [&](const draining_rank& r) { return r.who.name == name; });
  });
  return of == entries_.end() ? std::string{} : of->why_leaves;
}

void drain_list::forgotten(std::string_view name) {
  for (entry& x : entries_) {
    std::erase_if(x.ranks, [&](const draining_rank& one) { return one.who.name == name; });
  }
  std::erase_if(entries_, [](const entry& x) { return x.ranks.empty(); });
}

std::vector<drain_list::verdict> drain_list::judge(const unfinished_fn& unfinished,
                                                   steady_time now) {
  std::vector<verdict> all;
  for (entry& e : entries_) {
    const bool late = now >= e.deadline;
    if (e.leaves || e.cancelled || (!e.news && !late)) continue;
    // No rank is present: the drain is judged when a rank is back, in the same life.
    if (std::ranges::all_of(e.ranks, &draining_rank::lost)) continue;
    e.news = false;
    all.push_back(judged(e, unfinished(e.stage, e.replica), late));
  }
  return all;
}

drain_list::verdict drain_list::judged(entry& e, std::size_t unfinished, bool late) {
  verdict v;
  std::uint64_t queue = 0;
  std::uint64_t transfers = 0;
  bool quiet = true;
  for (const draining_rank& r : e.ranks) {
    if (r.lost) continue;
    v.ranks.push_back(r.who);
    quiet = quiet && r.quiet_beats >= quiet_beats_needed;
    queue = std::max<std::uint64_t>(queue, r.load.queue_length);
    transfers += r.load.active_transfers;
  }
  const std::string live = live_text(unfinished, queue, transfers);
  if (quiet && unfinished == 0) {
    v.leave = true;
    v.reason = drained_reason;
  } else if (late) {
    v.leave = true;
    v.reason = "left when the drain's deadline of " + time_text(e.patience) + " passed: " + live;
  } else {
    v.reason = "is drained within " + time_text(e.patience) + ": " + live;
  }
  e.leaves = v.leave;
  if (v.leave) e.why_leaves = v.reason;
  return v;
}

drain_list::draining_rank* drain_list::find(std::string_view name, std::uint64_t incarnation,
                                            entry** of) {
  for (entry& e : entries_) {
    for (draining_rank& r : e.ranks) {
      if (r.who.name != name || r.who.incarnation != incarnation) continue;
      *of = &e;
      return &r;
    }
  }
  return nullptr;
}

}  // namespace troupe::actors
