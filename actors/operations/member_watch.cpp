#include "troupe/actors/operations/member_watch.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include "troupe/actors/base/phrases.hpp"
#include "troupe/actors/messages/member_list.hpp"

namespace troupe {

std::string_view to_string(member_state state) noexcept {
  if (state == member_state::gone) return "gone";
  return actors::to_string(static_cast<actors::node_state>(state));
}

}  // namespace troupe

namespace troupe::actors {

namespace {

/// They have the same numbers.
member_state state_of(const member& shown) {
  return static_cast<member_state>(node_state_from(shown.state).value_or(node_state::joining));
}
static_assert(static_cast<int>(member_state::joining) == static_cast<int>(node_state::joining));
static_assert(static_cast<int>(member_state::up) == static_cast<int>(node_state::up));
static_assert(static_cast<int>(member_state::suspect) == static_cast<int>(node_state::suspect));
static_assert(static_cast<int>(member_state::down) == static_cast<int>(node_state::down));
static_assert(static_cast<int>(member_state::leaving) == static_cast<int>(node_state::leaving));

event_member event_of(const member& shown) {
  const auto& node = shown.node;
  return {node.name,        node.stage,      node.replica, node.rank,
          node.incarnation, state_of(shown), node.labels,  shown.reason};
}

}  // namespace

std::size_t member_watch::name::waiting() const {
  const bool news =
      there && (!told || told->incarnation != there->incarnation || told->state != there->state);
  return (end ? 1U : 0U) + (news ? 1U : 0U);
}

void member_watch::see(const membership& list) {
  ++lists_;
  for (const member& shown : list.members) {
    if (shown.node.name != self_ && !is_old_news(shown)) see(shown, list.supervisor_incarnation);
  }
  end_forgotten(list);
}

void member_watch::see(const member& shown, std::uint64_t supervisor) {
  const auto& node = shown.node;
  const bool lost = is_lost(shown);
  auto at = names_.find(node.name);
  if (at == names_.end()) {
    if (lost) return;
    at = names_.try_emplace(node.name).first;
  }
  auto& of = at->second;
  const bool same_life = of.there && of.there->incarnation == node.incarnation;
  if (same_life && !lost && of.there->state == state_of(shown)) {
    // The common case for most entries of a list.
    of.shown_by = supervisor;
    of.shown_in = lists_;
    return;
  }
  const auto before = of.waiting();
  if (of.there && !same_life) {
    // The same supervisor showed one after the other, which proves that the former is over.
    if (of.shown_by == supervisor) remember_over(of.there->incarnation);
    end_life(of, "another life has its name: " + life_text(node.incarnation));
  }
  if (lost) {
    if (of.there) end_life(of, shown.reason);
  } else {
    of.there = event_of(shown);
    // The life came back before the engine was told that it was gone.
    if (of.end && of.end->incarnation == node.incarnation) of.end.reset();
  }
  of.shown_by = supervisor;
  of.shown_in = lists_;
  update_turn(at, before);
}

/// A node that a list does not have is no member, unless it may not have had time to register with
/// that supervisor.
void member_watch::end_forgotten(const membership& list) {
  std::vector<names::iterator> unspoken;
  const auto forget = [this](names::iterator at, std::string why) {
    const auto before = at->second.waiting();
    end_life(at->second, std::move(why));
    update_turn(at, before);
  };
  for (auto next = names_.begin(); next != names_.end();) {
    const auto at = next++;
    if (!at->second.there || at->second.shown_in == lists_) continue;
    if (list.collecting == 0 || at->second.shown_by == list.supervisor_incarnation) {
      forget(at, "it is no longer a member of the cluster");
    } else {
      unspoken.push_back(at);
    }
  }
  if (unspoken.size() <= max_unspoken) return;
  const auto kept = unspoken.begin() + static_cast<std::ptrdiff_t>(unspoken.size() - max_unspoken);
  std::ranges::nth_element(unspoken, kept, {}, [](auto at) { return at->second.shown_in; });
  for (auto at = unspoken.begin(); at != kept; ++at) {
    forget(*at, "no supervisor has spoken of it since one was restarted");
  }
}

/// Ends the present life. The end is told only if the life was.
void member_watch::end_life(name& of, std::string why) {
  if (of.told && of.told->incarnation == of.there->incarnation) {
    of.end = std::move(of.there);
    of.end->state = member_state::gone;
    of.end->reason = std::move(why);
  }
  of.there.reset();
}

bool member_watch::is_old_news(const member& shown) const {
  const auto state = state_of(shown);
  return (state == member_state::joining || is_lost(shown)) &&
         over_.contains(shown.node.incarnation);
}

void member_watch::remember_over(std::uint64_t incarnation) {
  if (!over_.insert(incarnation).second) return;
  over_in_order_.push_back(incarnation);
  if (over_in_order_.size() <= max_over) return;
  over_.erase(over_in_order_.front());
  over_in_order_.pop_front();
}

void member_watch::update_turn(names::iterator of, std::size_t before) {
  auto& [called, state] = *of;
  const auto now = state.waiting();
  waiting_ = waiting_ - before + now;
  if (now != 0 && !state.turn) {
    state.turn = turns_.insert(turns_.end(), called);
  } else if (now == 0 && state.turn) {
    turns_.erase(*state.turn);
    state.turn.reset();
  }
  if (!state.there && !state.end) names_.erase(of);
}

event_member member_watch::pop() {
  const auto at = names_.find(turns_.front());
  auto& of = at->second;
  const auto before = of.waiting();
  event_member next;
  if (of.end) {
    next = std::move(*of.end);
    of.end.reset();
    of.told.reset();
  } else {
    next = *of.there;
    of.told = told_life{next.incarnation, next.state};
  }
  update_turn(at, before);
  return next;
}

}  // namespace troupe::actors
