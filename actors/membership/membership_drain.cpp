// The part of the membership table that carries out what operators do to nodes.

#include <utility>

#include "troupe/actors/base/phrases.hpp"
#include "troupe/actors/membership/membership.hpp"

namespace troupe::actors {

result<std::uint64_t> membership_table::drain(std::string_view name) {
  entry* e = find(name);
  const std::string who = "node " + in_quotes(name);
  if (e == nullptr && name == "supervisor") {
    return fail(errc::invalid_config,
                "the supervisor takes no requests and is not drained; transfers go on while it is "
                "stopped and started again");
  }
  if (e == nullptr)
    return fail(errc::not_found, "the deployment has no " + who + "; it has " + names_there_are());
  if (!e->state)
    return fail(errc::not_found, who + " has never registered, so there is nothing to drain");
  switch (*e->state) {
    case node_state::down:
      return fail(errc::peer_lost,
                  who + " is down (" + e->reason + "), so there is nothing to drain");
    case node_state::leaving:
      if (e->drains)
        return fail(errc::already_exists, who + " is being drained already: " + e->reason);
      break;
    case node_state::joining:
    case node_state::up:
    case node_state::suspect:
      change(*e, node_state::leaving, "an operator drains it");
      e->farewell.clear();
      e->leaves_itself = false;
      break;
  }
  e->drains = true;
  return e->info.incarnation;
}

result<std::vector<node_life>> membership_table::cancel_drain(std::string_view name,
                                                              steady_time now) {
  stood_still(now);
  if (auto can = may_cancel_drain(name); !can) return fail(can.error());
  const expected_slot& named = find(name)->slot;
  std::vector<node_life> all;
  for (entry& e : entries_) {
    if (e.slot.stage != named.stage || e.slot.replica != named.replica || !e.drains) continue;
    e.drains = false;  // even if it is down: it may come back in the same life
    if (e.state != node_state::leaving || !e.farewell.empty()) continue;
    const bool silent = now - e.heard >= suspect_after();
    change(e, silent ? node_state::suspect : node_state::up, "its drain was cancelled");
    all.push_back({e.slot.name, e.info.incarnation});
  }
  return all;
}

result<void> membership_table::may_cancel_drain(std::string_view name) const {
  const entry* e = find(name);
  const std::string who = "node " + in_quotes(name);
  if (e == nullptr)
    return fail(errc::not_found, "the deployment has no " + who + "; it has " + names_there_are());
  if (!e->state)
    return fail(errc::not_found, who + " has never registered, so there is no drain to cancel");
  if (e->state == node_state::down)
    return fail(errc::peer_lost, who + " is down (" + e->reason +
                                     "), so it is too late to cancel its drain; start it again");
  if (e->state != node_state::leaving)
    return fail(errc::not_found, who + " is " + std::string{to_string(*e->state)} +
                                     ": it is not being drained, so there is nothing to cancel");
  if (!e->drains || e->leaves_itself)
    return fail(
        errc::peer_lost,
        who +
            " leaves of its own accord, or has been drained since before the supervisor was "
            "restarted, so there is no drain to cancel; start it again when it has left");
  if (!e->farewell.empty())
    return fail(errc::peer_lost, who + " was told to leave already (" + e->farewell +
                                     "), so it is too late to cancel its drain; start it again "
                                     "when it has left");
  return {};
}

void membership_table::draining(std::string_view name, std::uint64_t incarnation,
                                std::string reason) {
  entry* e = find(name, incarnation);
  if (e != nullptr && e->drains && *e->state == node_state::leaving) e->reason = std::move(reason);
}

void membership_table::drained(std::string_view name, std::uint64_t incarnation,
                               std::string reason) {
  entry* e = find(name, incarnation);
  if (e == nullptr || !e->drains || *e->state != node_state::leaving) return;
  e->reason = reason;
  e->farewell = std::move(reason);
  e->leaves_itself = false;
}

}  // namespace troupe::actors
