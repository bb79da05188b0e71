#include "troupe/actors/operations/member_watch.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include "troupe/actors/base/phrases.hpp"
#include "troupe/actors/messages/member_list.hpp"
#include "troupe/kvcache/or_undo.hpp"

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

std::size_t member_watch::name::waiting() const noexcept {
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
  const bool known = at != names_.end();
  if (lost && !known) return;
  const bool same_life =
      known && at->second.there && at->second.there->incarnation == node.incarnation;
  if (same_life && !lost && at->second.there->state == state_of(shown)) {
    // The common case for most entries of a list.
    at->second.shown_by = supervisor;
    at->second.shown_in = lists_;
    return;
  }
  // All memory comes first, so that a name has changed as a whole or not at all.
  auto there = lost ? std::nullopt : std::optional{event_of(shown)};
  auto why_lost = lost ? shown.reason : std::string{};
  auto why_replaced = "another life has its name: " + life_text(node.incarnation);
  if (!known) at = add(node.name);
  auto& of = at->second;
  const bool replaced = of.there && !same_life;
  // The same supervisor showed one after the other, which proves that the former is over.
  if (replaced && of.shown_by == supervisor) remember_over(of.there->incarnation);

  const auto before = of.waiting();
  if (replaced) end_life(of, std::move(why_replaced));
  if (lost) {
    if (of.there) end_life(of, std::move(why_lost));
  } else {
    of.there = std::move(there);
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
void member_watch::end_life(name& of, std::string why) noexcept {
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
  const auto [at, fresh] = over_.insert(incarnation);
  if (!fresh) return;
  or_undo([&] { over_in_order_.push_back(incarnation); }, [&] { over_.erase(at); });
  if (over_in_order_.size() <= max_over) return;
  over_.erase(over_in_order_.front());
  over_in_order_.pop_front();
}

member_watch::names::iterator member_watch::add(const std::string& called) {
  const auto at = names_.try_emplace(called).first;
  auto& of = at->second;
  or_undo([&] { of.no_turn.push_back(&at->first); }, [&] { names_.erase(at); });
  of.turn = of.no_turn.begin();
  return at;
}

void member_watch::update_turn(names::iterator of, std::size_t before) noexcept {
  auto& state = of->second;
  const auto now = state.waiting();
  waiting_ = waiting_ - before + now;
  const bool has_turn = state.no_turn.empty();
  if (now != 0 && !has_turn) {
    turns_.splice(turns_.end(), state.no_turn);
  } else if (now == 0 && has_turn) {
    state.no_turn.splice(state.no_turn.end(), turns_, state.turn);
  }
  if (!state.there && !state.end) names_.erase(of);
}

event_member member_watch::pop() {
  const auto at = names_.find(*turns_.front());
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
