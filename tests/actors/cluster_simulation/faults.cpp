#include <algorithm>
#include <array>
#include <utility>

#include "link.hpp"
#include "supervisor_life.hpp"
#include "world.hpp"

namespace troupe::actors::cluster_simulation {

void world::plan_faults() {
  if (given.faults_per_second <= 0) return;
  const auto mean = microseconds{static_cast<std::int64_t>(1e6 / given.faults_per_second)};
  time.after(between(microseconds{0}, 2 * mean), [this] {
    if (faults_are_over_) return;
    something_goes_wrong();
    plan_faults();
  });
}

void world::something_goes_wrong() {
  const auto which = chance.upto(99);
  if (which < 30) return crash_a_node();
  if (which < 45) return freeze_a_node();
  if (which < 50) return replace_a_frozen_node();
  if (which < 62) return cut_a_node_from_the_supervisor();
  if (which < 74) return cut_a_pair();
  if (which < 88) return break_a_link();
  if (which < 92) return slow_the_network();
  if (which < 94) return cut_half_from_the_supervisor();
  if (which < 97) return freeze_the_supervisor();
  crash_the_supervisor();
}

void world::crash_a_node() {
  const auto node = chance.upto(static_cast<std::uint32_t>(lives_.size() - 1));
  if (!lives_[node]->alive) return;
  fault("node killed");
  end(life{lives_[node]});
  time.after(between(milliseconds{50}, milliseconds{9000}), [this, node] { start_node(node); });
}

void world::freeze_a_node() {
  const auto& who = lives_[chance.upto(static_cast<std::uint32_t>(lives_.size() - 1))];
  fault("node stopped");
  stand_still(who, between(milliseconds{20}, milliseconds{12'000}));
}

/// An operator, or a machine that watches over processes, starts the node anew while its former life
/// only stands still. That one wakes up later and goes on with what it had begun.
void world::replace_a_frozen_node() {
  const auto node = chance.upto(static_cast<std::uint32_t>(lives_.size() - 1));
  const life former = lives_[node];
  if (!former->alive) return;
  fault("frozen node replaced");
  stand_still(former, between(milliseconds{1000}, milliseconds{15'000}));
  time.after(between(milliseconds{10}, milliseconds{6000}), [this, node, former] {
    if (former->alive && lives_[node] == former) start_node(node);
  });
}

void world::cut(std::uint32_t a, std::uint32_t b, microseconds length) {
  if (a == b || !cuts_.insert({std::min(a, b), std::max(a, b)}).second) return;
  time.after(length, [this, a, b] {
    cuts_.erase({std::min(a, b), std::max(a, b)});
    if (b == supervisor_end) cut_last_[a] = now();
  });
}

void world::cut_a_node_from_the_supervisor() {
  fault("node cut from the supervisor");
  cut(chance.upto(static_cast<std::uint32_t>(lives_.size() - 1)), supervisor_end,
      between(milliseconds{100}, milliseconds{10'000}));
}

void world::cut_a_pair() {
  fault("pair cut");
  cut(chance.upto(given.prefills - 1), given.prefills + chance.upto(given.decodes - 1),
      between(milliseconds{100}, milliseconds{10'000}));
}

void world::cut_half_from_the_supervisor() {
  fault("half cut from the supervisor");
  const auto length = between(milliseconds{500}, milliseconds{10'000});
  for (std::uint32_t node = 0; node < lives_.size(); ++node) {
    if (chance.one_in(2)) cut(node, supervisor_end, length);
  }
}

void world::break_a_link() {
  const auto& who = lives_[chance.upto(static_cast<std::uint32_t>(lives_.size() - 1))];
  if (who->links.empty()) return;
  fault("link broken");
  const auto wire = who->links.begin()->second;
  wire->breaks(milliseconds{200});
}

void world::slow_the_network() {
  fault("network slow");
  slowest_ = between(milliseconds{2}, milliseconds{60});
  time.after(between(milliseconds{100}, milliseconds{3000}),
             [this] { slowest_ = milliseconds{2}; });
}

void world::freeze_the_supervisor() {
  fault("supervisor stopped");
  const auto length = between(milliseconds{100}, milliseconds{7000});
  stand_still(supervisor, length);
  supervisor_since_ = now() + length;
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
  time.after(between(milliseconds{100}, milliseconds{4000}), [this] {
    supervisor = std::make_shared<supervisor_life>(*this, slots_, kept);
    supervisor->awake_since = supervisor_since_ = now();
    supervisor->tick();
  });
  supervisor_since_ = now() + milliseconds{4000};
}

}  // namespace troupe::actors::cluster_simulation
