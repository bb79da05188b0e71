#pragma once

/// Decides which node of a stage a process becomes that was started for a stage, not for a name. A
/// plain class without threads, I/O or a clock; the `supervisor` actor feeds it with the uses of
/// the names from its `membership_table`.
///
/// A claim is granted a free name. A name is free if it was never used, or if its last life is down
/// and every present node knows that (lest anything of that life be taken for its successor's), and
/// if no life that a former supervisor took in under it may still come back. The name is held for
/// the incarnation that claimed it until that registers, or for `hold` after its last claim;
/// meanwhile no other life is granted the name or taken in under it. A renewed claim says which
/// name it was granted, by this supervisor or the previous one, and gets that name or none. Free
/// names are preferred in this order:
///
///   1. a name whose host in the file is the claimant's, before one of `auto` or of another
///      loopback address; a name of any other host is never granted;
///   2. a name in a replica that has a rank used or held: a replica serves only when it is whole;
///   3. a name that was never used;
///   4. the name that has been down for longest; else the first in the file's order.
///
/// A name has at most one claim, so the deployment bounds their number.

#include <chrono>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "troupe/actors/cluster_messages.hpp"
#include "troupe/actors/membership/membership.hpp"
#include "troupe/kvcache/result.hpp"

namespace troupe::actors {

class name_leases {
 public:
  name_leases(std::string cluster, std::vector<expected_slot> slots,
              std::chrono::milliseconds hold);

  /// Before that time only a claimant that already holds a name is granted one: a supervisor that
  /// knows nothing of the cluster cannot tell yet which names are free.
  void opens_at(steady_time at) { opens_ = at; }
  /// `uses` is `membership_table::uses`. The same incarnation gets the same name again, and holds it
  /// for longer unless it was taken in. Errors: `version_mismatch`, `invalid_config` (another cluster,
  /// no incarnation, no node of the stage belongs to that host), `not_found` (no such stage, or the
  /// claimant's name is not in it), `overloaded` (no name is free, or not yet), `already_exists`
  /// (the claimant's name belongs to another life).
  [[nodiscard]] result<name_lease> claim(const name_request& claim,
                                         const std::vector<slot_use>& uses, steady_time now);
  /// Why a life may not register under that name (`already_exists`); empty if it may.
  [[nodiscard]] std::optional<troupe::error> refusal(std::string_view name,
                                                     std::uint64_t incarnation,
                                                     steady_time now) const;
  /// The supervisor stood still for `gap`, until now, and could not hear that claims were renewed.
  void stood_still(std::chrono::steady_clock::duration gap, steady_time now);
  /// The life was taken in, which ends its claim.
  void registered(std::string_view name, std::uint64_t incarnation);

 private:
  struct slot {
    expected_slot what;
    std::optional<name_request> held_by;
    steady_time until{};

    [[nodiscard]] bool held(steady_time now) const { return held_by && now < until; }
  };

  [[nodiscard]] result<void> check(const name_request& claim) const;
  [[nodiscard]] std::string stages() const;
  /// Replicas that have a rank used or held.
  [[nodiscard]] std::set<std::uint32_t> replicas_begun(std::string_view stage,
                                                       const std::vector<slot_use>& uses,
                                                       steady_time now) const;
  [[nodiscard]] result<name_lease> renew(const name_request& claim,
                                         const std::vector<slot_use>& uses, steady_time now);
  [[nodiscard]] unexpected none_free(const name_request& claim, const std::vector<slot_use>& uses,
                                     steady_time now) const;
  [[nodiscard]] name_lease grant(slot& one, const name_request& claim, steady_time now);
  [[nodiscard]] name_lease told(const slot& one) const;

  std::string cluster_;
  std::vector<slot> slots_;
  std::chrono::milliseconds hold_;
  steady_time opens_{};
};

}  // namespace troupe::actors
