// The part of the membership table for reports of nodes on themselves, the use of names, and the
// state that outlives a supervisor.

#include <algorithm>
#include <tuple>

#include "troupe/actors/base/phrases.hpp"
#include "troupe/actors/membership/membership.hpp"
#include "troupe/actors/messages/member_list.hpp"

namespace troupe::actors {

// -- a node's own report

void membership_table::fail_itself(entry& e, const std::string& why) {
  const auto reason = std::string{report_prefix} + printable(why, max_failure);
  switch (*e.state) {
    case node_state::down:
      if (!e.reported || e.reason == reason) return;
      break;
    case node_state::leaving: return;
    case node_state::joining:
    case node_state::up:
    case node_state::suspect: break;
  }
  e.reported = true;
  change(e, node_state::down, reason);
}

bool membership_table::reports_failure(std::string_view name) const {
  const entry* e = find(name);
  return e != nullptr && e->reported;
}

// -- load

void membership_table::record_load(entry& e, const heartbeat& beat) {
  if (beat.sequence < e.sequence) return;
  const auto said = [](const load_report& x) {
    return std::tie(x.queue_length, x.active_transfers, x.blocks_total, x.blocks_free,
                    x.blocks_quarantined, x.links_up, x.links_broken);
  };
  lesser_news_ = lesser_news_ || said(e.load) != said(beat.load);
  e.sequence = beat.sequence;
  e.load = beat.load;
}

// -- lives

bool membership_table::former(const entry& e, std::uint64_t incarnation) {
  return std::ranges::find(e.replaced, incarnation) != e.replaced.end();
}

void membership_table::retire(entry& e, std::uint64_t incarnation) {
  if (incarnation == 0) return;
  e.replaced.push_back(incarnation);
  if (e.replaced.size() <= max_replaced) return;
  if (e.joined) refuse_for_good(e.replaced.front());
  e.replaced.pop_front();
}

// -- names

bool membership_table::is_there(const entry& e) {
  return e.state && (*e.state != node_state::down || e.reported);
}

std::size_t membership_table::nodes_there() const {
  return static_cast<std::size_t>(std::ranges::count_if(entries_, is_there));
}

std::vector<slot_use> membership_table::uses(steady_time now) const {
  using kind = slot_use::kind;
  std::uint64_t known_to_all = epoch_;
  for (const entry& e : entries_) {
    if (is_there(e)) known_to_all = std::min(known_to_all, e.adopted);
  }
  const bool all_had_time = !restored_ || now - *restored_ >= options_.heartbeat_timeout;
  std::vector<slot_use> all;
  for (const entry& e : entries_) {
    if (e.joined) break;  // joined nodes come last, and their names cannot be claimed
    slot_use use{kind::unused, e.info.incarnation, e.down_epoch};
    if (is_there(e)) {
      use.how = kind::used;
    } else if (!e.state && !all_had_time) {
      use.how = kind::awaited;  // even if the record lacks the name: the record may be old
    } else if (e.info.incarnation != 0) {
      use.how = e.down_epoch <= known_to_all ? kind::fenced : kind::down;
    }
    all.push_back(use);
  }
  return all;
}

/// Whether the node was leaving when the supervisor was restarted: requests placed on it go on.
bool membership_table::still_leaves(const entry& e, const node_info& node, steady_time now) const {
  return !e.state && e.info.incarnation == node.incarnation && e.registered != 0 && restored_ &&
         now - *restored_ < options_.heartbeat_timeout;
}

// -- the record

void membership_table::restore(const membership_record& left, steady_time now) {
  broadcast_epoch_ = epoch_ = std::max(epoch_, left.epoch_limit);
  restored_ = collects_from_ = now;
  for (const auto life : left.over) refuse_for_good(life);
  for (const membership_record::node& node : left.nodes) {
    entry* e = find(node.name);
    if (node.incarnation == 0 || (e != nullptr && e->state)) continue;
    if (e == nullptr) {
      restore_joined(node, now);
      continue;
    }
    for (const auto incarnation : node.former) retire(*e, incarnation);
    restore_life(*e, node, now);
  }
}

/// Restores the life of a node, and whether it may still be present.
void membership_table::restore_life(entry& e, const membership_record::node& node,
                                    steady_time now) {
  const expected_slot& slot = e.slot;
  e.info.name = slot.name;
  e.info.stage = slot.stage;
  e.info.role = static_cast<std::uint8_t>(slot.role);
  e.info.replica = slot.replica;
  e.info.rank = slot.rank;
  e.info.ranks = slot.ranks;
  e.info.host = node.host;
  e.info.port = node.port;
  e.info.incarnation = node.incarnation;
  e.info.pid = node.pid;
  switch (node.state) {
    // Only the life is restored. If the node were shown as down it would lose its links, and it may
    // have come back since the record was written.
    case node_state::down: e.down_epoch = epoch_; break;
    case node_state::leaving:
      e.down_epoch = epoch_;
      e.registered = node.registered;
      break;
    case node_state::joining:
    case node_state::up:
    case node_state::suspect:
      e.remembered = true;
      e.registered = node.registered;
      e.heard = now;
      change(e, node_state::joining, "was there before the supervisor was restarted");
      break;
  }
}

membership_record membership_table::record() const {
  membership_record out{options_.cluster, epoch_ + epoch_reserve, {}};
  for (const entry& e : entries_) {
    if (e.info.incarnation == 0) continue;
    out.nodes.push_back({e.slot.name,
                         e.state.value_or(node_state::down),
                         e.info.incarnation,
                         e.info.host,
                         e.info.port,
                         e.info.pid,
                         {e.replaced.begin(), e.replaced.end()},
                         e.registered});
    if (!e.joined) continue;
    out.nodes.back().ranks = e.slot.ranks;
    out.nodes.back().fingerprint = e.info.fingerprint;
    out.nodes.back().labels = e.info.labels;
  }
  out.over.assign(forgotten_.begin(), forgotten_.end());
  return out;
}

}  // namespace troupe::actors
