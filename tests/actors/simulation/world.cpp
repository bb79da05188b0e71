#include "world.hpp"

#include <utility>

#include "frontend.hpp"
#include "link.hpp"
#include "supervisor_life.hpp"

namespace troupe::actors::cluster_simulation {

namespace {

/// Time after the last outcome, in which deaths are noticed and everything left is given back.
constexpr milliseconds aftermath{40'000};

std::vector<expected_slot> slots_of(const options& of) {
  std::vector<expected_slot> out;
  for (std::uint32_t i = 0; i < of.prefills; ++i) {
    out.push_back({"prefill-" + std::to_string(i), "prefill", node_role::prefill, i, 0, 1});
  }
  for (std::uint32_t i = 0; i < of.decodes; ++i) {
    out.push_back({"decode-" + std::to_string(i), "decode", node_role::decode, i, 0, 1});
  }
  return out;
}

}  // namespace

world::world(const options& of)
    : chance{of.seed},
      given{of},
      slots_{slots_of(of)},
      cut_last_(slots_.size()),
      lives_(slots_.size()) {
  for (std::uint32_t i = 0; i < slots_.size(); ++i) numbers_[slots_[i].name] = i;
}

world::~world() {
  for (const auto& how : apart_) how();
}

std::optional<std::uint32_t> world::number_of(const std::string& name) const {
  const auto found = numbers_.find(name);
  return found == numbers_.end() ? std::nullopt : std::optional{found->second};
}

report world::run() {
  start_supervisor();
  for (std::uint32_t i = 0; i < slots_.size(); ++i) start_node(i);
  frontend_ = std::make_unique<frontend>(*this);
  frontend_->begin();
  plan_faults();
  check_standing();
  std::optional<moment> until;
  const auto cut_off = [&] { return given.at_most && now() >= begun_ + *given.at_most; };
  while (told.violation.empty() && (!until || now() < *until) && !cut_off() && time.step()) {
    ++told.events;
    if (!until && frontend_->all_have_ended()) {
      faults_are_over_ = true;
      until = now() + aftermath;
    }
  }
  told.virtual_time = std::chrono::duration_cast<microseconds>(now() - begun_);
  if (told.violation.empty() && !cut_off()) check_the_end();
  for (const auto& line : lines_) told.trace += line + "\n";
  return std::move(told);
}

void world::start_supervisor() {
  supervisor = std::make_shared<supervisor_life>(*this, slots_, kept);
  takes_apart([who = std::weak_ptr{supervisor}] {
    if (const auto one = who.lock()) one->take_apart();
  });
  supervisor->awake_since = supervisor_since_ = now();
  supervisor->tick();
}

// -- processes

void world::in(const std::shared_ptr<process>& where, std::function<void()> what) {
  if (!where->alive || !told.violation.empty()) return;
  if (now() < where->stands_still_until || !where->held_up.empty()) {
    where->held_up.push_back(std::move(what));
    return;
  }
  what();
}

void world::stand_still(const std::shared_ptr<process>& who, microseconds length) {
  if (!who->alive) return;
  note("stands still", who->incarnation, static_cast<std::uint64_t>(length.count()));
  who->stands_still_until = std::max(who->stands_still_until, now() + length);
  who->awake_since = who->stands_still_until;
  time.at(who->stands_still_until, [this, who] {
    if (now() < who->stands_still_until) return;
    for (auto& what : std::exchange(who->held_up, {})) {
      if (who->alive && told.violation.empty()) what();
    }
  });
}

void world::suspend(const std::shared_ptr<process>& who, microseconds length) {
  if (!who->alive || now() < who->stands_still_until) return;
  stand_still(who, length);
  // Planned behind the wake-up of that moment, and before anything that wakes there.
  who->behind += length;
  who->suspended.emplace_back(who->stands_still_until, length);
}

microseconds world::passed(const process& whose, moment since) const {
  auto passed_by = std::chrono::duration_cast<microseconds>(now() - since);
  for (const auto& [end, length] : whose.suspended) {
    const auto begin = std::max(since, end - length);
    if (end > begin)
      passed_by -= std::chrono::duration_cast<microseconds>(std::min(end, now()) - begin);
  }
  return passed_by;
}

// -- the verdict

void world::violate(const std::string& what) {
  if (!told.violation.empty()) return;
  told.violation = what;
  note("VIOLATED: " + what);
}

void world::note(std::string_view what, std::uint64_t a, std::uint64_t b) {
  const auto mix = [this](std::uint64_t value) {
    told.digest = (told.digest ^ value) * 0x9E3779B97F4A7C15U;
    told.digest ^= told.digest >> 29U;
  };
  mix(static_cast<std::uint64_t>(
      std::chrono::duration_cast<microseconds>(now().time_since_epoch()).count()));
  for (const char c : what) mix(static_cast<std::uint8_t>(c));
  mix(a);
  mix(b);
  if (given.traced) trace(std::string{what} + " " + std::to_string(a) + " " + std::to_string(b));
}

void world::trace(const std::string& line) {
  if (!given.traced) return;
  const auto at = std::chrono::duration_cast<microseconds>(now() - begun_).count();
  lines_.push_back(std::to_string(at) + " us  " + line);
  if (lines_.size() > given.trace_lines) lines_.pop_front();
}

/// Checks the invariants that hold for each node at every moment.
void world::check_standing() {
  time.after(milliseconds{100}, [this] { check_standing(); });
  frontend_->sweep();
  if (!supervisor->alive) return;
  for (const auto& at : lives_) check_node(at);
}

void world::check_node(const life& at) {
  const auto& options = supervisor->members().options();
  const auto past = options.heartbeat_timeout + milliseconds{1000};
  if (now() < supervisor_since_ + past) return;
  const auto state = supervisor->members().state_of(at->info.name);
  const bool listed = supervisor->members().incarnation_of(at->info.name) == at->incarnation;
  const bool believed = listed && (state == node_state::up || state == node_state::suspect);
  if (!at->alive) {
    return require(!believed || now() < at->died + past, "a dead node is not noticed");
  }
  // A life beside a former one that was up is accepted once that one is suspect, and may have to
  // ask twice; broken connections take their timeouts.
  const auto settled = past + milliseconds{10'000};
  const auto well_since =
      std::max({at->born, at->awake_since, cut_last_[at->node], supervisor_since_});
  if (!reach(at->node, supervisor_end) || now() < well_since + settled) return;
  check_drain(at, well_since + settled);
  if (told.violation.empty() && (!at->failure.empty() || now() < at->failed_last + settled)) return;
  if (drains_.contains(at->incarnation)) return;
  // A node whose former life woke up before it was suspect is kept out while that life is alive.
  for (auto rival = at->former; rival; rival = rival->former) {
    if (rival->alive || now() < rival->died + settled) return;
  }
  if (listed && state == node_state::up) return;
  violate("a node that is well is not up: " + at->info.name + " is " +
          (state ? std::string{to_string(*state)} : "not there") +
          (listed ? "" : " in another life"));
}

/// Checks that a drained node has left by its deadline, if nothing prevents it.
void world::check_drain(const life& at, moment well) {
  const auto found = drains_.find(at->incarnation);
  if (found == drains_.end() || found->second.by != supervisor->number || now() < well) return;
  const auto late = clock_of(*supervisor) - found->second.deadline;
  require(late < milliseconds{10'000}, "a drained node is still there after its deadline");
}

/// No request may be placed on a life that knows of its drain.
bool world::may_be_placed_on(const node_info& node) const {
  const auto& at = lives_[*number_of(node.name)];
  return at->incarnation != node.incarnation || at->drain.standing() == drain_standing::serving;
}

void world::check_alarm(const node_transition& change) {
  if (change.to != node_state::suspect && change.to != node_state::down) return;
  const auto& at = lives_[*number_of(change.name)];
  if (at->incarnation != change.incarnation || !at->alive) return;
  if (!at->registered || at->supervisor->broken || !reach(at->node, supervisor_end)) return;
  if (!at->failure.empty()) return;
  const auto well_since =
      std::max({at->registered_since, at->awake_since, cut_last_[at->node], at->failed_last});
  // A supervisor cannot know of time that its clock did not count.
  if (passed(*supervisor, well_since) < supervisor->members().options().heartbeat_timeout) return;
  violate("a false alarm: " + change.name + " " + std::string{to_string(change.to)} + ", " +
          change.reason);
}

void world::check_the_end() {
  frontend_->sweep();
  if (const auto left = frontend_->unsettled(); !left.empty()) violate("did not end: " + left);
  for (const auto& at : lives_) {
    if (!at->alive) continue;
    const auto counters = at->pool.counters();
    require(counters.free == counters.total, "blocks are lost: at " + at->info.name);
    check_watch(at);
  }
}

report run(const options& of) {
  return world{of}.run();
}

std::string kind_of(const std::string& violation) {
  return violation.substr(0, violation.find(':'));
}

troupe::testing::shrinkable<options, report> whole() {
  return {run, kind_of, [](options& of, const report& first) {
            of.faults = first.drawn_faults;
            of.at_most = first.virtual_time + std::chrono::seconds{10};
            return std::vector<troupe::testing::dispensable<options>>{
                {"faults", of.faults->size(),
                 [](options& from, std::size_t i) {
                   return std::exchange((*from.faults)[i].happens, false);
                 }},
                {"nodes", std::size_t{of.prefills} + of.decodes,
                 [](options& from, std::size_t i) {
                   return from.absent_nodes.insert(static_cast<std::uint32_t>(i)).second;
                 }},
                {"requests", of.requests, [](options& from, std::size_t i) {
                   return from.unasked_requests.insert(static_cast<std::uint32_t>(i)).second;
                 }}};
          }};
}

options small(std::uint64_t seed) {
  options of;
  of.seed = seed;
  of.prefills = 3 + static_cast<std::uint32_t>(seed % 4);
  of.decodes = 2 + static_cast<std::uint32_t>(seed % 5);
  of.requests = 600;
  of.requests_per_second = 60;
  of.faults_per_second = 1.5;
  of.blocks = 24;
  return of;
}

options large(std::uint64_t seed) {
  options of;
  of.seed = seed;
  of.prefills = 500;
  of.decodes = 500;
  of.requests = 10'000;
  of.requests_per_second = 1000;
  of.faults_per_second = 5;
  return of;
}

}  // namespace troupe::actors::cluster_simulation
