// The part of the membership table for nodes that no file names, in open stages.

#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include "troupe/actors/base/phrases.hpp"
#include "troupe/actors/membership/membership.hpp"
#include "troupe/config/open_name.hpp"
#include "troupe/kvcache/layout.hpp"

namespace troupe::actors {

namespace {

/// The number of lives without an entry that are remembered, to be refused.
constexpr std::size_t max_forgotten = 4096;

unexpected bad_announcement(const node_info& node, const std::string& what) {
  return fail(errc::invalid_config, "node " + in_quotes(node.name) + " joins with " + what);
}

}  // namespace

result<void> check_announcement(const node_info& node, const open_stage& stage) {
  const auto role = node_role_from(node.role);
  if (role != stage.role) {
    return bad_announcement(
        node, "role " + (role ? std::string{to_string(*role)} : std::to_string(node.role)) +
                  " stage " + in_quotes(node.stage) + ", whose role is " +
                  std::string{to_string(stage.role)} + "; run it with the file of the cluster");
  }
  if (!config::open_replica_name.allows(node.replica_name)) {
    return bad_announcement(node, "replica " + in_quotes(node.replica_name) +
                                      "; a replica is called by " +
                                      config::open_replica_name.text());
  }
  // A replica with more ranks could never be whole.
  const auto most =
      stage.role == node_role::store ? 1 : std::min(stage.max_nodes, kvcache::max_ranks);
  if (node.ranks == 0 || node.ranks > most || node.rank >= node.ranks) {
    return bad_announcement(
        node, "rank " + std::to_string(node.rank) + " of " + std::to_string(node.ranks) +
                  "; a replica of that stage has 1 to " + std::to_string(most) + " ranks, from 0");
  }
  if (node.name != config::open_node_name({node.stage, node.replica_name, node.rank})) {
    return bad_announcement(
        node,
        "a name that is not " + config::open_node_name({node.stage, node.replica_name, node.rank}));
  }
  if (const auto wrong = wrong_labels(node.labels)) return bad_announcement(node, *wrong);
  return {};
}

const open_stage* membership_table::open_stage_of(std::string_view stage) const {
  const auto found = std::ranges::find(options_.open, stage, &open_stage::name);
  return found == options_.open.end() ? nullptr : &*found;
}

std::string membership_table::stages_that_are_open() const {
  std::set<std::string> names;
  for (const open_stage& stage : options_.open) names.insert(stage.name);
  return list_of(names);
}

// -- joining

result<membership_table::entry*> membership_table::joining(const node_info& node, steady_time now) {
  const open_stage* stage = open_stage_of(node.stage);
  if (stage == nullptr) {
    return fail(errc::not_found,
                "node " + in_quotes(node.name) + " would join stage " + in_quotes(node.stage) +
                    ", which is not open; stages that are: " + stages_that_are_open());
  }
  if (auto fine = check_announcement(node, *stage); !fine) return fail(fine.error());
  if (std::ranges::find(forgotten_, node.incarnation) != forgotten_.end()) {
    return fail(errc::stale_incarnation,
                "this life of node " + in_quotes(node.name) +
                    " was gone for so long that it was forgotten; start the process again");
  }
  if (auto fits = check_replica(node); !fits) return fail(fits.error());
  if (entry* known = find(node.name)) return known;
  if (auto room = make_room(*stage, now); !room) return fail(room.error());
  return &enter({node.name, node.stage, stage->role, replica_number(node.stage, node.replica_name),
                 node.rank, node.ranks});
}

/// Checks that the node fits the present ranks of its replica and has an incarnation of its own.
result<void> membership_table::check_replica(const node_info& node) const {
  for (const entry& e : entries_) {
    if (e.info.incarnation == node.incarnation && e.slot.name != node.name) {
      return fail(errc::already_exists,
                  "node " + in_quotes(node.name) + " joins with the incarnation of another, " +
                      life_text(node.incarnation) + "; each start of a process draws its own");
    }
    const bool other = e.joined && e.slot.stage == node.stage &&
                       e.info.replica_name == node.replica_name && e.slot.rank != node.rank;
    if (!other || !is_there(e)) continue;
    if (e.info.ranks != node.ranks) {
      return fail(errc::layout_mismatch,
                  "node " + in_quotes(node.name) + " says that its replica has " +
                      count_of(node.ranks, "rank") + ", rank " + std::to_string(e.slot.rank) +
                      " says " + std::to_string(e.info.ranks));
    }
    if (e.info.fingerprint != node.fingerprint) {
      return fail(errc::layout_mismatch, "the layout of node " + in_quotes(node.name) +
                                             " has fingerprint " + hex_text(node.fingerprint) +
                                             ", that of rank " + std::to_string(e.slot.rank) +
                                             " of its replica " + hex_text(e.info.fingerprint));
    }
  }
  return {};
}

/// Finds a place in the stage: a free one, or that of the node which has been down for longest, if
/// that did not lose its connection only a moment ago.
result<void> membership_table::make_room(const open_stage& stage, steady_time now) {
  std::size_t there = 0;
  std::optional<std::size_t> oldest;
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    const entry& e = entries_[i];
    if (!e.joined || e.slot.stage != stage.name) continue;
    ++there;
    const bool gone =
        !is_there(e) && e.down_since && now - *e.down_since >= options_.heartbeat_timeout;
    if (!gone) continue;
    if (!oldest || e.down_epoch < entries_[*oldest].down_epoch) oldest = i;
  }
  if (there < stage.max_nodes) return {};
  if (!oldest) {
    return fail(errc::overloaded, "stage " + in_quotes(stage.name) + " has " +
                                      count_of(there, "node") +
                                      ", as many as it is open to; stop one, or raise its "
                                      "open.max_nodes");
  }
  forget(*oldest, "gave its place to another, the stage is full");
  return {};
}

membership_table::entry& membership_table::enter(expected_slot slot) {
  index_.emplace(slot.name, entries_.size());
  entry& fresh = entries_.emplace_back();
  fresh.slot = std::move(slot);
  fresh.joined = true;
  return fresh;
}

/// The number that the replica's other ranks have; else one that no replica has had before.
std::uint32_t membership_table::replica_number(std::string_view stage, std::string_view replica) {
  for (const entry& e : entries_) {
    if (e.joined && e.slot.stage == stage && e.info.replica_name == replica) return e.slot.replica;
  }
  return last_joined_replica_++;
}

/// Forgets ranks that are gone and do not fit the replica in its new shape.
void membership_table::reshape(const node_info& node) {
  for (std::size_t i = entries_.size(); i-- > 0;) {
    const entry& e = entries_[i];
    const bool other = e.joined && e.slot.stage == node.stage &&
                       e.info.replica_name == node.replica_name && e.slot.rank != node.rank;
    if (!other || (e.info.ranks == node.ranks && e.info.fingerprint == node.fingerprint)) continue;
    forget(i, "its replica came back in another shape");
  }
}

// -- forgetting nodes

void membership_table::refuse_for_good(std::uint64_t life) {
  if (life == 0) return;
  forgotten_.push_back(life);
  if (forgotten_.size() > max_forgotten) forgotten_.pop_front();
}

void membership_table::forget(std::size_t index, std::string why) {
  entry& e = entries_[index];
  for (const auto life : e.replaced) refuse_for_good(life);
  refuse_for_good(e.info.incarnation);
  ++epoch_;
  transitions_.push_back(
      {e.slot.name, e.info.incarnation, e.state, node_state::down, epoch_, std::move(why), true});
  entries_.erase(entries_.begin() + static_cast<std::ptrdiff_t>(index));
  index_.clear();
  for (std::size_t i = 0; i < entries_.size(); ++i) index_.emplace(entries_[i].slot.name, i);
}

void membership_table::forget_the_gone(steady_time now) {
  for (std::size_t i = entries_.size(); i-- > 0;) {
    entry& e = entries_[i];
    if (!e.joined) break;
    if (is_there(e)) continue;
    if (!e.down_since) e.down_since = now;
    if (now - *e.down_since < options_.forget_after) continue;
    forget(i, "has been gone for " +
                  time_text(
                      std::chrono::duration_cast<std::chrono::milliseconds>(now - *e.down_since)));
  }
}

std::vector<expected_slot> membership_table::replica_of(std::string_view name) const {
  std::vector<expected_slot> ranks;
  const entry* named = find(name);
  if (named == nullptr) return ranks;
  for (const entry& e : entries_) {
    const bool same = e.slot.stage == named->slot.stage && e.slot.replica == named->slot.replica;
    if (same) ranks.push_back(e.slot);
  }
  return ranks;
}

// -- the record of a previous supervisor

void membership_table::restore_joined(const membership_record::node& node, steady_time now) {
  const auto place = config::open_place_of(node.name);
  if (!place) return;  // a file named it once, and no longer does
  const open_stage* stage = open_stage_of(place->stage);
  const auto in_stage = [&](const entry& e) { return e.joined && e.slot.stage == place->stage; };
  const bool fits = stage != nullptr && node.ranks != 0 && place->rank < node.ranks &&
                    node.ranks <= kvcache::max_ranks &&
                    std::ranges::count_if(entries_, in_stage) < std::ptrdiff_t{stage->max_nodes};
  if (!fits) {
    for (const auto life : node.former) refuse_for_good(life);
    refuse_for_good(node.incarnation);
    return;
  }
  entry& e = enter({node.name, place->stage, stage->role,
                    replica_number(place->stage, place->replica), place->rank, node.ranks});
  e.info.replica_name = place->replica;
  e.info.fingerprint = node.fingerprint;
  e.info.labels = node.labels;
  for (const auto life : node.former) retire(e, life);
  // Like a node of the file, a node that was down may come back; if it does not, `tick` forgets it.
  restore_life(e, node, now);
}

}  // namespace troupe::actors
