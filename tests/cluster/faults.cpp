#include "faults.hpp"

#include <algorithm>
#include <set>
#include <thread>

#include "waiting.hpp"

namespace troupe::testing {

namespace {

using std::chrono::milliseconds;
using clock = std::chrono::steady_clock;

constexpr milliseconds drain_deadline{3000};

bool is_of_the_supervisor(fault_kind kind) {
  return kind == fault_kind::cut_supervisor || kind == fault_kind::kill_supervisor;
}

std::string node_of(const char* stage, std::uint64_t number) {
  return std::string{stage} + "-" + std::to_string(number);
}

}  // namespace

std::string to_string(fault_kind kind) {
  switch (kind) {
    case fault_kind::kill: return "kill";
    case fault_kind::freeze: return "freeze";
    case fault_kind::cut_pair: return "cut pair";
    case fault_kind::cut_supervisor: return "cut supervisor";
    case fault_kind::unplug: return "unplug";
    case fault_kind::drain: return "drain";
    case fault_kind::kill_supervisor: return "kill supervisor";
  }
  return "?";
}

std::string to_string(const planned_fault& fault) {
  std::string text = to_string(fault.kind);
  for (const auto& victim : fault.victims) text += " " + victim;
  return text + " for " + std::to_string(fault.lasts.count()) + " ms";
}

// -- the schedule

fault_schedule::fault_schedule(std::uint64_t seed, const cluster_shape& shape, bool with_cuts)
    : dice_{seed},
      shape_{shape},
      kinds_{fault_kind::kill, fault_kind::freeze, fault_kind::drain, fault_kind::kill_supervisor} {
  if (!with_cuts) return;
  for (const auto kind : {fault_kind::cut_pair, fault_kind::cut_supervisor, fault_kind::unplug})
    kinds_.push_back(kind);
}

std::string fault_schedule::any_node() {
  const auto which = below(shape_.prefills + shape_.decodes);
  return which < shape_.prefills ? node_of("prefill", which)
                                 : node_of("decode", which - shape_.prefills);
}

planned_fault fault_schedule::draw() {
  planned_fault f;
  f.kind = kinds_[below(kinds_.size())];
  switch (f.kind) {
    case fault_kind::kill:
    case fault_kind::kill_supervisor: f.lasts = milliseconds{below(2000)}; break;
    case fault_kind::freeze: f.lasts = milliseconds{200 + below(7800)}; break;
    case fault_kind::drain: f.lasts = milliseconds{100}; break;
    case fault_kind::cut_pair:
    case fault_kind::cut_supervisor:
    case fault_kind::unplug: f.lasts = milliseconds{500 + below(7500)}; break;
  }
  if (f.kind == fault_kind::cut_pair) {
    f.victims = {node_of("prefill", below(shape_.prefills)),
                 node_of("decode", below(shape_.decodes))};
  } else if (f.kind == fault_kind::cut_supervisor) {
    std::vector<std::string> all = node_names(shape_);
    all.erase(all.begin());
    std::ranges::shuffle(all, dice_);
    all.resize(all.size() / 2);
    f.victims = all;
  } else if (f.kind != fault_kind::kill_supervisor) {
    f.victims = {any_node()};
  }
  return f;
}

bool fault_schedule::leaves_enough(const episode& e) const {
  std::set<std::string> touched;
  std::size_t of_supervisor = 0;
  bool drains = false;
  for (const auto& f : e.faults) {
    if (is_of_the_supervisor(f.kind)) ++of_supervisor;
    drains = drains || f.kind == fault_kind::drain;
    for (const auto& victim : f.victims) {
      if (!touched.insert(victim).second) return false;
    }
  }
  if (of_supervisor > 1 || (of_supervisor > 0 && drains)) return false;
  const auto left = [&](const char* stage, std::uint32_t count) {
    for (std::uint32_t i = 0; i < count; ++i) {
      if (!touched.contains(node_of(stage, i))) return true;
    }
    return false;
  };
  return left("prefill", shape_.prefills) && left("decode", shape_.decodes);
}

episode fault_schedule::next() {
  episode e;
  e.pause = milliseconds{500 + below(1500)};
  const std::size_t count = below(10) < 6 ? 1 : 2;
  while (e.faults.size() < count) {
    auto f = draw();
    if (!e.faults.empty()) f.after = milliseconds{below(1500)};
    e.faults.push_back(std::move(f));
    if (!leaves_enough(e)) e.faults.pop_back();
  }
  std::ranges::stable_sort(e.faults, {}, &planned_fault::after);
  return e;
}

// -- the hand

void fault_hand::begin(const planned_fault& fault) {
  switch (fault.kind) {
    case fault_kind::kill: cluster_.kill(fault.victims[0]); break;
    case fault_kind::freeze: cluster_.freeze(fault.victims[0]); break;
    case fault_kind::cut_pair: net_->cut(fault.victims[0], fault.victims[1]); break;
    case fault_kind::cut_supervisor:
      for (const auto& victim : fault.victims) net_->cut("supervisor", victim);
      break;
    case fault_kind::unplug: net_->unplug(fault.victims[0]); break;
    case fault_kind::drain: drain(fault.victims[0]); break;
    case fault_kind::kill_supervisor: cluster_.kill("supervisor"); break;
  }
}

void fault_hand::end(const planned_fault& fault) {
  switch (fault.kind) {
    case fault_kind::kill: cluster_.start(fault.victims[0]); break;
    case fault_kind::freeze: cluster_.thaw(fault.victims[0]); break;
    case fault_kind::cut_pair: net_->mend(fault.victims[0], fault.victims[1]); break;
    case fault_kind::cut_supervisor:
      for (const auto& victim : fault.victims) net_->mend("supervisor", victim);
      break;
    case fault_kind::unplug: net_->plug(fault.victims[0]); break;
    case fault_kind::drain: {
      const auto& name = fault.victims[0];
      if (!comes_true([&] { return cluster_.gone(name); }, milliseconds{10})) {
        violations_.push_back(name + " was drained and did not leave");
        cluster_.kill(name);
      }
      cluster_.start(name);
      break;
    }
    case fault_kind::kill_supervisor: cluster_.start("supervisor"); break;
  }
}

void fault_hand::drain(const std::string& name) {
  actors::drain_request order;
  order.name = name;
  order.deadline_ms = static_cast<std::uint32_t>(drain_deadline.count());
  const auto drains = client_.drain(order);
  if (drains) return;
  violations_.push_back(name + " could not be drained: " + to_string(drains.error()));
  cluster_.ask_to_end(name);
}

}  // namespace troupe::testing
