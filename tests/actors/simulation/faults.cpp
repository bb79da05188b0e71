#include <algorithm>
#include <array>
#include <utility>

#include "link.hpp"
#include "supervisor_life.hpp"
#include "world.hpp"

namespace troupe::actors::cluster_simulation {

void world::plan_faults() {
  if (given.faults_per_second <= 0) return;
  if (given.faults) return plan_fault(0);
  const auto mean = microseconds{static_cast<std::int64_t>(1e6 / given.faults_per_second)};
  time.after(between(microseconds{0}, 2 * mean), [this] {
    if (faults_are_over_) return;
    told.drawn_faults.push_back({std::chrono::duration_cast<microseconds>(now() - begun_), {}});
    something_goes_wrong();
    plan_faults();
  });
}

/// Plans a fault of a repeated run. It draws the same numbers as the original run, so that the
/// events after a fault stay the same for as long as nothing else differs.
void world::plan_fault(std::size_t which) {
  static_cast<void>(chance.next());
  if (which == given.faults->size()) return;
  const auto& drawn = (*given.faults)[which];
  time.at(begun_ + drawn.after_begin, [this, which, &drawn] {
    if (faults_are_over_) return;
    told.drawn_faults.push_back({drawn.after_begin, {}, drawn.happens});
    next_draw_ = 0;
    if (drawn.happens) {
      something_goes_wrong();
    } else {
      while (next_draw_ < drawn.draws.size()) static_cast<void>(fate(1));
      told.drawn_faults.back().draws = drawn.draws;
    }
    plan_fault(which + 1);
  });
}

/// A number in [0, below) for the current fault.
std::uint64_t world::fate(std::uint64_t below) {
  auto value = chance.next() % below;
  auto& draws = told.drawn_faults.back().draws;
  if (given.faults) {
    const auto& drawn = (*given.faults)[told.drawn_faults.size() - 1].draws;
    if (next_draw_ < drawn.size()) value = drawn[next_draw_++] % below;
  }
  draws.push_back(value);
  return value;
}

microseconds world::fate_between(microseconds least, microseconds most) {
  return least + microseconds{fate(static_cast<std::uint64_t>((most - least).count() + 1))};
}

std::uint32_t world::fated_node() {
  return static_cast<std::uint32_t>(fate(lives_.size()));
}

void world::something_goes_wrong() {
  const auto which = fate(100);
  if (which < 26) return crash_a_node();
  if (which < 37) return freeze_a_node();
  if (which < 42) return replace_a_frozen_node();
  if (which < 52) return cut_a_node_from_the_supervisor();
  if (which < 61) return cut_a_pair();
  if (which < 74) return break_a_link();
  if (which < 77) return slow_the_network();
  if (which < 79) return cut_half_from_the_supervisor();
  if (which < 82) return freeze_the_supervisor();
  if (which < 84) return suspend_the_supervisor();
  if (which < 86) return stop_the_supervisors_ticks();
  if (which < 89) return suspend_a_node();
  if (which < 92) return fail_an_engine();
  if (which < 97) return drain_a_node();
  crash_the_supervisor();
}

void world::crash_a_node() {
  const auto node = fated_node();
  if (!lives_[node]->alive) return;
  fault("node killed", node);
  end(life{lives_[node]});
  time.after(fate_between(milliseconds{50}, milliseconds{9000}),
             [this, node] { start_node(node); });
}

void world::freeze_a_node() {
  const auto& who = lives_[fated_node()];
  fault("node stopped", who->node);
  stand_still(who, fate_between(milliseconds{20}, milliseconds{12'000}));
}

/// An operator or a process manager starts the node again while its former life is only frozen.
/// That life wakes up later and continues its work.
void world::replace_a_frozen_node() {
  const auto node = fated_node();
  const life former = lives_[node];
  if (!former->alive) return;
  fault("frozen node replaced", node);
  stand_still(former, fate_between(milliseconds{1000}, milliseconds{15'000}));
  time.after(fate_between(milliseconds{10}, milliseconds{6000}), [this, node, former] {
    if (former->alive && lives_[node] == former) start_node(node);
  });
}

void world::cut(std::uint32_t a, std::uint32_t b, microseconds length) {
  if (a == b || !cuts_.insert({std::min(a, b), std::max(a, b)}).second) return;
  trace("cut " + std::to_string(a) + " " + std::to_string(b) + " for " +
        std::to_string(length.count()) + " us");
  time.after(length, [this, a, b] {
    trace("joined again " + std::to_string(a) + " " + std::to_string(b));
    cuts_.erase({std::min(a, b), std::max(a, b)});
    if (b == supervisor_end) cut_last_[a] = now();
  });
}

void world::cut_a_node_from_the_supervisor() {
  const auto length = fate_between(milliseconds{100}, milliseconds{10'000});
  const auto node = fated_node();
  fault("node cut from the supervisor", node);
  cut(node, supervisor_end, length);
}

void world::cut_a_pair() {
  fault("pair cut");
  const auto length = fate_between(milliseconds{100}, milliseconds{10'000});
  const auto of_decodes = static_cast<std::uint32_t>(fate(given.decodes));
  cut(static_cast<std::uint32_t>(fate(given.prefills)), given.prefills + of_decodes, length);
}

void world::cut_half_from_the_supervisor() {
  fault("half cut from the supervisor");
  const auto length = fate_between(milliseconds{500}, milliseconds{10'000});
  for (std::uint32_t node = 0; node < lives_.size(); ++node) {
    if (fate(2) == 0) cut(node, supervisor_end, length);
  }
}

void world::break_a_link() {
  const auto& who = lives_[fated_node()];
  if (who->links.empty()) return;
  fault("link broken");
  const auto wire = who->links.begin()->second;
  if (fate(3) == 0) return wire->breaks(milliseconds{200});
  wire->breaks_and_returns();
}

void world::slow_the_network() {
  fault("network slow");
  slowest_ = fate_between(milliseconds{2}, milliseconds{60});
  time.after(fate_between(milliseconds{100}, milliseconds{3000}),
             [this] { slowest_ = milliseconds{2}; });
}

void world::freeze_the_supervisor() {
  fault("supervisor stopped");
  const auto length = fate_between(milliseconds{100}, milliseconds{7000});
  stand_still(supervisor, length);
  // It may already be frozen for longer.
  supervisor_since_ = std::max(supervisor_since_, supervisor->stands_still_until);
}

/// The host is suspended, and the node's monotonic clock stops meanwhile.
void world::suspend_a_node() {
  const auto& who = lives_[fated_node()];
  fault("node's clock stalled", who->node);
  suspend(who, fate_between(milliseconds{20}, milliseconds{12'000}));
}

void world::suspend_the_supervisor() {
  if (now() < supervisor->stands_still_until) return;
  fault("supervisor's clock stalled");
  const auto length = fate_between(milliseconds{100}, milliseconds{7000});
  suspend(supervisor, length);
  supervisor_since_ = std::max(supervisor_since_, supervisor->stands_still_until);
}

/// Time passes and messages are handled, but the supervisor's timer does not tick.
void world::stop_the_supervisors_ticks() {
  fault("supervisor without ticks");
  supervisor->ticks_again = now() + fate_between(milliseconds{100}, milliseconds{7000});
  supervisor_since_ = std::max(supervisor_since_, supervisor->ticks_again);
}

void world::drain_a_node() {
  const life at = lives_[fated_node()];
  const auto deadline = std::chrono::duration_cast<milliseconds>(
      fate_between(milliseconds{200}, milliseconds{15'000}));
  fault("node drained", at->node);
  const auto whom = supervisor;
  time.after(one_way(), [this, whom, at, deadline] {
    in(whom, [whom, at, deadline] { whom->drain(at->info.name, deadline); });
  });
}

void world::fail_an_engine() {
  const life at = lives_[fated_node()];
  fault("engine failed", at->node);
  in(at, [this, at] {
    const bool first = at->failure.empty();
    at->failure = "simulated";
    note("engine fails", at->node);
    if (first && at->registered) say_alive(at);
  });
  time.after(fate_between(milliseconds{50}, milliseconds{8000}), [this, at] {
    in(at, [this, at] {
      if (at->failure.empty()) return;
      at->failure.clear();
      at->failed_last = now();
      note("engine recovers", at->node);
      if (!std::exchange(at->registered, false)) return;
      reach_supervisor(at);
    });
  });
}

void world::crash_the_supervisor() {
  if (!supervisor->alive) return;
  fault("supervisor killed");
  note("supervisor killed");
  supervisor->alive = false;
  supervisor->held_up.clear();
  for (const auto& at : lives_) {
    if (at->supervisor) break_connection(at->supervisor, milliseconds{20});
  }
  time.after(fate_between(milliseconds{100}, milliseconds{4000}), [this] { start_supervisor(); });
  supervisor_since_ = now() + milliseconds{4000};
}

}  // namespace troupe::actors::cluster_simulation
