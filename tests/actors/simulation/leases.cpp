// Leases that hold the blocks of transfers for the other side, and how they lapse when that side is
// dead.

#include <algorithm>
#include <utility>

#include "troupe/actors/messages/member_list.hpp"

#include "link.hpp"
#include "transfer.hpp"
#include "world.hpp"

namespace troupe::actors::cluster_simulation {

namespace {

constexpr auto lease_length = std::chrono::milliseconds{3000};  // as `node_life::leases_of` says

}  // namespace

void transfer::hold(side s) {
  const auto& at = ends_[s].at;
  at->holds[operation(s).value] = {shared_from_this(), s,
                                   at->members ? at->members->when.first : 0};
  const auto& peer = placed_on(other(s)).name;
  // As engines do: a `receive` names its placement, a `send` does not.
  const cache_leases::mark placed{s == decode ? where_.supervisor_incarnation : 0,
                                  s == decode ? where_.epoch : 0};
  world_.trace("holds " + std::to_string(operation(s).value) + " at " + at->info.name + " for " +
               peer);
  at->leases.hold(operation(s), peer, world_.clock_of(*at), placed);
}

void transfer::meet(side s) {
  const auto& at = ends_[s].at;
  const auto& peer = placed_on(other(s));
  world_.trace("meets " + std::to_string(operation(s).value) + " at " + at->info.name);
  at->leases.meet(operation(s), transfer_id{number_}, peer.name, incarnation{peer.incarnation},
                  world_.clock_of(*at));
}

void transfer::let_go(side s) {
  const auto& at = ends_[s].at;
  if (at->holds.erase(operation(s).value) != 0) at->leases.end(operation(s));
}

void transfer::lapses(side s, const error& why) {
  auto& e = ends_[s];
  if (e.outcomes > 0) return;
  const bool met = s == decode ? receiver_.has_value() : sender_.has_value();
  if (met) return link_lost(s, why);
  e.reclaimed = s == prefill;
  conclude_side(s, why);
  unpin(s);
}

void world::lapsed(const life& at, const std::vector<cache_leases::lapse>& lapses) {
  for (const auto& over : lapses) {
    check_lapse(at, over);
    const auto found = at->holds.find(over.operation.value);
    if (found == at->holds.end()) continue;
    const auto held = found->second;
    note("a hold is over", over.operation.value, static_cast<std::uint64_t>(over.why));
    ++told.lapses;
    const bool unread = over.why == cache_leases::cause::unread;
    held.of->lapses(static_cast<side>(held.side),
                    {unread ? errc::lease_expired : errc::peer_lost, "its hold is over"});
  }
}

/// Checks that a hold ended because its holder died, never because it had to wait. The list that
/// this node was told shows whether it did.
void world::check_lapse(const life& at, const cache_leases::lapse& over) {
  const auto found = at->holds.find(over.operation.value);
  require(found != at->holds.end(), "a hold lapsed that had been given back");
  if (found == at->holds.end() || !at->members) return;
  const auto& peer = found->second.of->placed_on(other(static_cast<side>(found->second.side)));
  const auto* shown = at->members->by_node[*number_of(peer.name)];
  if (shown == nullptr) return;
  const bool down = node_state_from(shown->state) == node_state::down && !reports_failure(*shown);
  const bool same = shown->node.incarnation == peer.incarnation;
  // A list that is older than the placement proves nothing about it.
  const auto placed = found->second.of->placed_when();
  if (at->members->when < placed) return;
  // A peer that was taken for dead and registered again has lost what was placed on it before.
  const bool again = at->members->when.first == placed.first && shown->registered > placed.second;
  // Without a supervisor, nothing tells whether a life is alive once the link with it is lost.
  const bool watched =
      at->registered && std::max(at->registered_since, at->awake_since) + lease_length < now();
  const bool linked = at->links.contains(peer.incarnation);
  const bool unheard = over.why == cache_leases::cause::unheard;
  if (unheard && !watched && !linked) return;
  // The hold was for the life that a former supervisor showed; another life in the list of a new
  // supervisor proves nothing.
  if (unheard && at->members->when.first != found->second.under) return;
  trace("  at " + at->info.name + " for " + peer.name + " life " +
        std::to_string(peer.incarnation) + ", shown " + std::to_string(shown->node.incarnation) +
        " " + std::to_string(shown->state) + (watched ? ", watched" : "") +
        (linked ? ", linked" : ""));
  require(down || again || !same, "a hold is over while its holder lives and is known to");
}

}  // namespace troupe::actors::cluster_simulation
