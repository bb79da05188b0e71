#include "troupe/actors/membership/membership.hpp"

#include <algorithm>
#include <utility>

#include "troupe/actors/base/broadcast_budget.hpp"
#include "troupe/actors/base/phrases.hpp"
#include "troupe/actors/messages/member_list.hpp"

namespace troupe::actors {

namespace {

constexpr std::size_t max_host_length = 255;

std::string milliseconds_text(std::chrono::steady_clock::duration d) {
  return std::to_string(std::chrono::duration_cast<std::chrono::milliseconds>(d).count()) + " ms";
}

std::string address(const node_info& node) {
  return in_quotes(node.host) + " port " + std::to_string(node.port) + " (pid " +
         std::to_string(node.pid) + ")";
}

unexpected differs(const expected_slot& slot, std::string_view what, const std::string& found,
                   const std::string& expected) {
  return fail(errc::invalid_config, "node '" + slot.name + "' registers with " + std::string{what} +
                                        " " + found + " but the deployment says " + expected +
                                        "; start it from the same file as the supervisor");
}

}  // namespace

membership_table::membership_table(membership_options options) : options_{std::move(options)} {
  entries_.reserve(options_.slots.size());
  for (const auto& slot : options_.slots) {
    if (index_.emplace(slot.name, entries_.size()).second) {
      entries_.emplace_back().slot = slot;
    }
  }
}

// -- events

result<registration> membership_table::registered(const registration_request& request,
                                                  steady_time now) {
  stood_still(now);
  if (auto ok = check_identity(request); !ok) return fail(ok.error());
  const auto found = request.join == 0 ? named_by_file(request.node) : joining(request.node, now);
  if (!found) return fail(found.error());
  entry& e = **found;
  if (auto ok = check_replacement(request.node, e, now); !ok) return fail(ok.error());

  const bool same_life = e.state && e.info.incarnation == request.node.incarnation;
  const bool moved =
      !same_life || e.info.host != request.node.host || e.info.port != request.node.port;
  const bool returns =
      !same_life || *e.state == node_state::down || *e.state == node_state::leaving;
  const bool goes_on = still_leaves(e, request.node, now);
  std::string reason = same_life ? "registered again" : "registered";
  if (!same_life && e.info.incarnation != request.node.incarnation) {
    if (e.state && *e.state != node_state::down) reason = "replaces the former life of that node";
    retire(e, e.info.incarnation);
  }
  // A node that reported a failure was not out of the cluster: placements on it stay valid.
  const bool was_there = same_life && e.reported;
  e.reported = e.remembered = false;
  e.info = request.node;
  e.info.replica = e.slot.replica;
  e.slot.ranks = request.node.ranks;
  if (!e.joined) {
    e.info.replica_name.clear();
    e.info.fingerprint = {};
    e.info.labels.clear();
  }
  e.sequence = e.adopted = 0;
  e.heard = std::max(e.heard, now);
  if (!same_life) {
    e.drains = e.leaves_itself = false;
    e.farewell.clear();
  }
  if (e.drains && *e.state != node_state::leaving) {
    change(e, node_state::leaving, "registered again while it is drained");
    e.registered = epoch_;
  } else if (returns && !e.drains) {
    e.load = {};
    e.farewell.clear();
    e.leaves_itself = false;
    change(e, node_state::joining, std::move(reason));
    if (!goes_on && !was_there) e.registered = epoch_;
  } else if (moved) {
    change(e, *e.state, "registered again under another address");
  }

  registration reply;
  reply.replica = e.slot.replica;
  reply.epoch = epoch_;
  reply.supervisor_incarnation = options_.supervisor_incarnation;
  reply.heartbeat_interval_ms = static_cast<std::uint32_t>(options_.heartbeat_interval.count());
  if (e.joined) {
    reshape(request.node);  // may remove entries and so invalidate `e`
    reply.epoch = epoch_;
  }
  return reply;
}

heartbeat_verdict membership_table::heard(const heartbeat& beat, steady_time now) {
  entry* e = find(beat.name);
  if (e == nullptr) return heartbeat_verdict::unknown;
  if (former(*e, beat.incarnation)) return heartbeat_verdict::stale;
  if (!e->state || e->remembered || e->info.incarnation != beat.incarnation) {
    return heartbeat_verdict::unknown;
  }
  if (!beat.failure.empty()) fail_itself(*e, beat.failure);
  switch (*e->state) {
    case node_state::down:
      if (!e->reported) return heartbeat_verdict::unknown;
      break;
    case node_state::joining: change(*e, node_state::up, "first heartbeat"); break;
    case node_state::suspect: change(*e, node_state::up, "heard again"); break;
    case node_state::up:
    case node_state::leaving: break;
  }
  e->heard = std::max(e->heard, now);
  // The first beat is sent before the list that follows the registration arrives, and may refer to
  // another supervisor's epochs.
  if (e->sequence != 0 && beat.sequence >= e->sequence)
    e->adopted = beat.epoch <= epoch_ ? beat.epoch : 0;
  record_load(*e, beat);
  return heartbeat_verdict::known;
}

bool membership_table::leave(std::string_view name, std::uint64_t incarnation, steady_time now) {
  entry* e = find(name, incarnation);
  if (e == nullptr) return false;
  switch (*e->state) {
    case node_state::leaving: break;
    case node_state::down:
      if (!std::exchange(e->reported, false)) return false;
      [[fallthrough]];
    case node_state::joining:
    case node_state::up:
    case node_state::suspect: change(*e, node_state::leaving, "stops in good order"); break;
  }
  if (e->farewell.empty()) {
    e->farewell = e->drains ? "left before it was drained" : "left";
    e->leaves_itself = true;
  }
  e->heard = std::max(e->heard, now);
  return true;
}

bool membership_table::connection_lost(std::string_view name, std::uint64_t incarnation,
                                       std::string_view reason, steady_time /*now*/) {
  entry* e = find(name, incarnation);
  if (e == nullptr) return false;
  switch (*e->state) {
    case node_state::leaving:
      change(*e, node_state::down,
             e->farewell.empty() ? "lost while it was drained: " + printable(reason, max_failure)
                                 : e->farewell);
      break;
    case node_state::down:
      if (!std::exchange(e->reported, false)) return false;
      [[fallthrough]];
    case node_state::joining:
    case node_state::up:
    case node_state::suspect:
      change(*e, node_state::down, "connection lost: " + printable(reason, max_failure));
      break;
  }
  return true;
}

std::chrono::steady_clock::duration membership_table::stood_still(steady_time now) {
  if (!last_tick_ || now - *last_tick_ <= options_.stall_tolerance) return {};
  const auto gap = now - *last_tick_;
  for (entry& e : entries_) e.heard = std::max(e.heard, std::min(now, e.heard + gap));
  if (collects_from_) collects_from_ = std::min(now, *collects_from_ + gap);
  if (restored_) restored_ = std::min(now, *restored_ + gap);
  last_tick_ = now;
  return gap;
}

void membership_table::tick(steady_time now) {
  stood_still(now);
  if (!last_tick_ || now > *last_tick_) last_tick_ = now;
  for (entry& e : entries_) judge(e, now);
  forget_the_gone(now);
  judge_collecting(now);
}

/// Called after the nodes of a record have been judged: by then each is `up` or `down`.
void membership_table::judge_collecting(steady_time now) {
  if (!collects_from_) collects_from_ = now;
  if (!collecting_ || now - *collects_from_ < options_.heartbeat_timeout) return;
  collecting_ = false;
  lesser_news_ = true;
}

void membership_table::judge(entry& e, steady_time now) {
  if (!e.state) return;
  const auto silent = now - e.heard;
  const bool timed_out = silent >= options_.heartbeat_timeout;
  const bool missed = silent >= suspect_after();
  const auto silence = [&] { return "not heard for " + milliseconds_text(silent); };
  switch (*e.state) {
    case node_state::down:
      if (!e.reported || !timed_out) break;
      e.reported = false;
      change(e, node_state::down, silence());
      break;
    case node_state::joining:
    case node_state::leaving:
    case node_state::suspect:
      if (timed_out) change(e, node_state::down, silence());
      break;
    case node_state::up:
      if (timed_out) {
        change(e, node_state::down, silence());
      } else if (missed) {
        change(e, node_state::suspect, silence());
      }
      break;
  }
}

// -- checks

result<void> membership_table::check_identity(const registration_request& request) const {
  const node_info& node = request.node;
  if (request.version != protocol_version) {
    return fail(errc::version_mismatch,
                "node " + in_quotes(node.name) + " speaks protocol version " +
                    std::to_string(request.version) + ", this supervisor speaks version " +
                    std::to_string(protocol_version) + "; run the same release on every host");
  }
  if (request.cluster != options_.cluster) {
    return fail(errc::invalid_config, "node " + in_quotes(node.name) + " belongs to cluster " +
                                          in_quotes(request.cluster) +
                                          ", this supervisor to cluster " +
                                          in_quotes(options_.cluster) +
                                          "; check the supervisor's address in the node's file");
  }
  if (node.incarnation == 0 || node.port == 0 || node.host.empty() ||
      node.host.size() > max_host_length) {
    return fail(errc::invalid_config,
                "node " + in_quotes(node.name) +
                    " registers without a host, a bound port or an incarnation; it must bind its "
                    "port first and register what was bound");
  }
  if (!is_boot_id(node.boot_id)) {
    return fail(errc::invalid_config,
                "node " + in_quotes(node.name) + " registers with an invalid boot id (" +
                    in_quotes(node.boot_id) + "); it must run this release of Troupe");
  }
  return {};
}

result<membership_table::entry*> membership_table::named_by_file(const node_info& node) {
  entry* e = find(node.name);
  if (e == nullptr || e->joined) {
    return fail(errc::not_found, "the deployment has no node " + in_quotes(node.name) +
                                     " (it has " + names_there_are() +
                                     "); start the node under one of these names");
  }
  if (auto ok = check_slot(node, e->slot); !ok) return fail(ok.error());
  return e;
}

result<void> membership_table::check_slot(const node_info& node, const expected_slot& slot) const {
  const auto role = node_role_from(node.role);
  if (!role || *role != slot.role) {
    return differs(slot, "role",
                   role ? std::string{to_string(*role)} : "number " + std::to_string(node.role),
                   std::string{to_string(slot.role)});
  }
  if (node.stage != slot.stage) return differs(slot, "stage", in_quotes(node.stage), slot.stage);
  if (node.rank != slot.rank) {
    return differs(slot, "rank", std::to_string(node.rank), std::to_string(slot.rank));
  }
  if (node.ranks != slot.ranks) {
    return differs(slot, "number of ranks", std::to_string(node.ranks), std::to_string(slot.ranks));
  }
  return {};
}

result<void> membership_table::check_replacement(const node_info& node, const entry& e,
                                                 steady_time now) const {
  if (former(e, node.incarnation)) {
    return fail(errc::stale_incarnation, "this life of node '" + e.slot.name +
                                             "' was replaced by the one at " + address(e.info) +
                                             "; stop one of the two processes");
  }
  if (!e.state || e.remembered || e.info.incarnation == node.incarnation) return {};
  switch (*e.state) {
    case node_state::down:
    case node_state::leaving: return {};
    case node_state::joining:
    case node_state::up:
    case node_state::suspect: break;
  }
  // A process that listens on the address of the old life proves that the old life does not.
  if (e.info.host == node.host && e.info.port == node.port) return {};
  if (now - e.heard >= suspect_after()) return {};
  return fail(errc::already_exists,
              "node '" + e.slot.name + "' is " + std::string{to_string(*e.state)} + " at " +
                  address(e.info) + ", heard " + milliseconds_text(now - e.heard) +
                  " ago; stop that process first, or start this one under another name");
}

// -- results

void membership_table::change(entry& e, node_state to, std::string reason) {
  ++epoch_;
  e.reason = std::move(reason);
  transitions_.push_back({e.slot.name, e.info.incarnation, e.state, to, epoch_, e.reason});
  e.state = to;
  e.down_since.reset();
  if (to == node_state::down) e.down_epoch = epoch_;
}

std::vector<node_transition> membership_table::take_transitions() {
  return std::exchange(transitions_, {});
}

std::optional<membership> membership_table::take_broadcast(steady_time now) {
  const bool changed = broadcast_epoch_ != epoch_;
  if (!changed && !lesser_news_) return std::nullopt;
  const auto pause = changed ? change_interval() : load_interval();
  if (last_broadcast_ && now - *last_broadcast_ < pause) return std::nullopt;
  broadcast_epoch_ = epoch_;
  lesser_news_ = false;
  last_broadcast_ = now;
  auto list = view();
  last_told_ = list.members.size();
  return list;
}

namespace {

/// A list for each of n nodes carries n * n entries in all.
std::chrono::milliseconds time_for(std::chrono::microseconds an_entry, std::size_t nodes) {
  const auto n = static_cast<std::int64_t>(nodes);
  return std::chrono::duration_cast<std::chrono::milliseconds>(an_entry * n * n);
}

}  // namespace

/// Long enough for the previous list to have gone out, at the pace of `broadcast_budget`, with time
/// to spare: the network layer takes whatever it is given, and would hold more and more lists.
std::chrono::milliseconds membership_table::change_interval() const noexcept {
  return std::max(options_.broadcast_interval,
                  time_for(broadcast_budget::an_entry * 3 / 2, last_told_));
}

/// Limits the broadcasts of loads to 20,000 entries a second.
std::chrono::milliseconds membership_table::load_interval() const noexcept {
  return std::max(options_.heartbeat_interval,
                  time_for(std::chrono::microseconds{50}, entries_.size()));
}

membership membership_table::view() const {
  membership out;
  out.cluster = options_.cluster;
  out.supervisor_incarnation = options_.supervisor_incarnation;
  out.epoch = epoch_;
  out.collecting = collecting_ ? 1 : 0;
  for (const entry& e : entries_) {
    if (!e.state) continue;
    out.members.push_back(
        {e.info, static_cast<std::uint8_t>(*e.state), e.load, e.reason, e.registered});
  }
  return out;
}

std::optional<node_state> membership_table::state_of(std::string_view name) const {
  const entry* e = find(name);
  return e == nullptr ? std::nullopt : e->state;
}

std::optional<std::uint64_t> membership_table::incarnation_of(std::string_view name) const {
  const entry* e = find(name);
  if (e == nullptr || !e->state) return std::nullopt;
  return e->info.incarnation;
}

heartbeat_ack membership_table::ack(heartbeat_verdict verdict) const noexcept {
  return {verdict == heartbeat_verdict::known, epoch_, options_.supervisor_incarnation};
}

std::chrono::milliseconds membership_table::suspect_after() const noexcept {
  return options_.heartbeat_interval * options_.suspect_after_missed;
}

std::string membership_table::names_there_are() const {
  std::vector<std::string> named;
  for (const entry& e : entries_) {
    if (!e.joined) named.push_back(e.slot.name);
  }
  const auto names = list_of(named);
  return options_.open.empty() ? names : names + "; open to others: " + stages_that_are_open();
}

membership_table::entry* membership_table::find(std::string_view name, std::uint64_t incarnation) {
  entry* e = find(name);
  return e == nullptr || !e->state || e->info.incarnation != incarnation ? nullptr : e;
}

membership_table::entry* membership_table::find(std::string_view name) {
  const auto it = index_.find(name);
  return it == index_.end() ? nullptr : &entries_[it->second];
}

const membership_table::entry* membership_table::find(std::string_view name) const {
  const auto it = index_.find(name);
  return it == index_.end() ? nullptr : &entries_[it->second];
}

}  // namespace troupe::actors
