#include "troupe/actors/membership/name_leases.hpp"

#include <algorithm>
#include <set>
#include <tuple>
#include <utility>

#include "troupe/actors/base/phrases.hpp"
#include "troupe/config/automatic_host.hpp"
#include "troupe/config/hosts.hpp"

namespace troupe::actors {

namespace {

constexpr std::size_t max_host_length = 255;

/// How well a slot of host `slots` suits a process on host `claimants`: 0 is best, empty is unfit.
std::optional<int> suits(const std::string& slots, const std::string& claimants) {
  if (config::canonical_host(slots) == config::canonical_host(claimants)) return 0;
  const bool loopback = config::is_loopback(slots) && config::is_loopback(claimants);
  if (config::is_automatic(slots) || claimants.empty() || loopback) return 1;
  return std::nullopt;
}

}  // namespace

name_leases::name_leases(std::string cluster, std::vector<expected_slot> slots,
                         std::chrono::milliseconds hold)
    : cluster_{std::move(cluster)}, hold_{hold} {
  for (expected_slot& one : slots) slots_.push_back({std::move(one), std::nullopt, {}});
}

result<name_lease> name_leases::claim(const name_request& claim, const std::vector<slot_use>& uses,
                                      steady_time now) {
  if (auto fine = check(claim); !fine) return fail(fine.error());
  if (!claim.held.empty()) return renew(claim, uses, now);
  using kind = slot_use::kind;
  const auto begun = replicas_begun(claim.stage, uses, now);
  using rank = std::tuple<int, bool, bool, std::uint64_t>;
  slot* best = nullptr;
  rank best_rank{};
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    slot& one = slots_[i];
    const slot_use& use = uses[i];
    if (one.what.stage != claim.stage) continue;
    if (one.held(now)) {
      if (one.held_by->incarnation == claim.incarnation) return grant(one, claim, now);
      continue;
    }
    // The life was taken in already, and its process has not heard of that yet.
    if (use.incarnation == claim.incarnation) return told(one);
    const auto host = suits(one.what.host, claim.host);
    if (!host || (use.how != kind::unused && use.how != kind::fenced)) continue;
    const rank order{*host, !begun.contains(one.what.replica), use.how != kind::unused,
                     use.down_epoch};
    if (best != nullptr && order >= best_rank) continue;
    best = &one;
    best_rank = order;
  }
  if (now < opens_) {
    return fail(errc::overloaded,
                "this supervisor has no record of the cluster, and nodes that were there before it "
                "started may still register; it gives names in " +
                    time_text(std::chrono::ceil<std::chrono::milliseconds>(opens_ - now)));
  }
  if (best == nullptr) return none_free(claim, uses, now);
  return grant(*best, claim, now);
}

/// The claimant already is that node, except for the registration.
result<name_lease> name_leases::renew(const name_request& claim, const std::vector<slot_use>& uses,
                                      steady_time now) {
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    slot& one = slots_[i];
    if (one.what.name != claim.held || one.what.stage != claim.stage) continue;
    const bool mine = one.held(now) && one.held_by->incarnation == claim.incarnation;
    if (!mine && uses[i].incarnation == claim.incarnation) return told(one);
    if (mine || (!one.held(now) && uses[i].how != slot_use::kind::used))
      return grant(one, claim, now);
    return fail(errc::already_exists,
                "node " + in_quotes(claim.held) +
                    (one.held(now) ? " was claimed by pid " + std::to_string(one.held_by->pid) +
                                         " on host " + in_quotes(one.held_by->host)
                                   : " is in use by another process") +
                    " meanwhile; start this process again, it gets another name then");
  }
  return fail(errc::not_found, "stage " + in_quotes(claim.stage) + " has no node " +
                                   in_quotes(claim.held) + "; start this process again");
}

std::optional<troupe::error> name_leases::refusal(std::string_view name, std::uint64_t incarnation,
                                                  steady_time now) const {
  const auto found = std::ranges::find(slots_, name, [](const slot& s) { return s.what.name; });
  if (found == slots_.end() || !found->held(now)) return std::nullopt;
  const name_request& by = *found->held_by;
  if (by.incarnation == incarnation) return std::nullopt;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(found->until - now);
  return troupe::error{errc::already_exists,
                       "node " + in_quotes(name) + " was claimed by pid " + std::to_string(by.pid) +
                           " on host " + in_quotes(by.host) +
                           ", which is about to register; it is " + "free again in " +
                           time_text(left) + " if that does not"};
}

void name_leases::stood_still(std::chrono::steady_clock::duration gap, steady_time now) {
  for (slot& one : slots_) {
    if (one.held(now - gap)) one.until += gap;
  }
  if (now - gap < opens_) opens_ += gap;
}

void name_leases::registered(std::string_view name, std::uint64_t incarnation) {
  for (slot& one : slots_) {
    const bool its_own = one.held_by && one.held_by->incarnation == incarnation;
    if (one.what.name == name && its_own) one.held_by.reset();
  }
}

result<void> name_leases::check(const name_request& claim) const {
  if (claim.version != protocol_version) {
    return fail(errc::version_mismatch,
                "the process that asks speaks protocol version " + std::to_string(claim.version) +
                    ", this supervisor version " + std::to_string(protocol_version) +
                    "; run the same release on every host");
  }
  if (claim.cluster != cluster_) {
    return fail(errc::invalid_config, "the process that asks belongs to cluster " +
                                          in_quotes(claim.cluster) +
                                          ", this supervisor to cluster " + in_quotes(cluster_) +
                                          "; check the supervisor's address in its file");
  }
  if (claim.incarnation == 0 || claim.host.size() > max_host_length) {
    return fail(errc::invalid_config, "a claim names an incarnation and a host of at most " +
                                          std::to_string(max_host_length) + " characters");
  }
  const auto of_stage = [&](const slot& s) { return s.what.stage == claim.stage; };
  if (std::ranges::none_of(slots_, of_stage)) {
    return fail(errc::not_found,
                "the deployment has no stage " + in_quotes(claim.stage) + "; it has " + stages());
  }
  std::set<std::string> hosts;
  for (const slot& one : slots_) {
    if (!of_stage(one)) continue;
    if (suits(one.what.host, claim.host)) return {};
    hosts.insert(one.what.host);
  }
  return fail(errc::invalid_config, "no node of stage " + in_quotes(claim.stage) +
                                        " belongs to host " + in_quotes(claim.host) +
                                        "; its hosts are " + list_of(hosts) +
                                        ": start it there, or add auto to them");
}

std::string name_leases::stages() const {
  std::set<std::string> names;
  for (const slot& one : slots_) names.insert(one.what.stage);
  return list_of(names);
}

std::set<std::uint32_t> name_leases::replicas_begun(std::string_view stage,
                                                    const std::vector<slot_use>& uses,
                                                    steady_time now) const {
  std::set<std::uint32_t> replicas;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const slot& one = slots_[i];
    const auto how = uses[i].how;
    const bool busy =
        one.held(now) || how == slot_use::kind::used || how == slot_use::kind::awaited;
    if (one.what.stage == stage && busy) replicas.insert(one.what.replica);
  }
  return replicas;
}

unexpected name_leases::none_free(const name_request& claim, const std::vector<slot_use>& uses,
                                  steady_time now) const {
  std::size_t all = 0;
  std::size_t used = 0;
  std::size_t awaited = 0;
  std::size_t held = 0;
  std::size_t down = 0;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const slot& one = slots_[i];
    if (one.what.stage != claim.stage || !suits(one.what.host, claim.host)) continue;
    ++all;
    if (one.held(now)) {
      ++held;
    } else if (uses[i].how == slot_use::kind::used) {
      ++used;
    } else if (uses[i].how == slot_use::kind::awaited) {
      ++awaited;
    } else {
      ++down;
    }
  }
  std::string sentence = "none of the " + count_of(all, "node") + " of stage " +
                         in_quotes(claim.stage) +
                         " for this host is free: " + std::to_string(used) + " in use, " +
                         std::to_string(held) + " claimed by processes that are starting, " +
                         std::to_string(down) + " down, which not every node has heard yet";
  if (awaited != 0) {
    sentence += ", " + std::to_string(awaited) +
                " whose processes may still come back to this supervisor, which was restarted";
  }
  return fail(errc::overloaded,
              sentence + (used == all ? "; stop or drain one, or give the stage more replicas"
                                      : "; ask again in a moment"));
}

name_lease name_leases::grant(slot& one, const name_request& claim, steady_time now) {
  one.held_by = claim;
  one.until = now + hold_;
  return told(one);
}

name_lease name_leases::told(const slot& one) const {
  return {0, {}, one.what.name, static_cast<std::uint32_t>(hold_.count())};
}

}  // namespace troupe::actors
