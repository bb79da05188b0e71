#pragma once

/// Which node of a stage a process shall be that was started for the stage and not for a name. A plain
/// class without threads, I/O or a clock; the `supervisor` actor feeds it with what its
/// `membership_table` knows of the names.
///
/// A claim is granted a name that is free: never used, or its last life is down and every node that is
/// there knows it (so that nothing of that life is taken for its successor's); and nobody whom a former
/// supervisor took in under it may still come back. The name is held for the
/// incarnation that claimed it until that registers, or for `hold` after it asked last; nobody else is
/// granted it or taken in under it meanwhile. A claim that is renewed says which name it was granted,
/// by this supervisor or by the one before it: it gets that name or none. Of the names that are free,
/// in this order:
///
///   1. one whose host in the file is the claimant's, before one of `auto` or of another loopback
///      address; one of any other host is never granted;
///   2. one of a replica of which a rank is used or held: a replica serves only when it is whole;
///   3. one that was never used;
///   4. the one that has been down for longest; else the first in the file's order.
///
/// One claim per name at most: bounded by the deployment.

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

class slot_claims {
 public:
  slot_claims(std::string cluster, std::vector<expected_slot> slots,
              std::chrono::milliseconds hold);

  /// Nobody is granted a name before, except who holds one: a supervisor that knows nothing of the
  /// cluster cannot tell yet whose names are free.
  void opens_at(steady_time at) { opens_ = at; }
  /// `uses` is `membership_table::uses`. The same incarnation gets the same name again, and holds it
  /// for longer unless it was taken in. Errors: `version_mismatch`, `invalid_config` (another cluster,
  /// no incarnation, no node of the stage belongs to that host), `not_found` (no such stage, or the name
  /// that it held is none of it), `overloaded` (none is free, or not yet), `already_exists` (the name
  /// that it held is another's).
  [[nodiscard]] result<slot_grant> claim(const slot_claim& claim, const std::vector<slot_use>& uses,
                                         steady_time now);
  /// Why a life may not register under that name (`already_exists`); empty: it may.
  [[nodiscard]] std::optional<troupe::error> refusal(std::string_view name,
                                                     std::uint64_t incarnation,
                                                     steady_time now) const;
  /// The supervisor stood still for so long, until now: nobody whose claim was renewed meanwhile could
  /// be heard.
  void stood_still(std::chrono::steady_clock::duration gap, steady_time now);
  /// It was taken in: its claim is over.
  void registered(std::string_view name, std::uint64_t incarnation);

 private:
  struct slot {
    expected_slot what;
    std::optional<slot_claim> held_by;
    steady_time until{};

    [[nodiscard]] bool held(steady_time now) const { return held_by && now < until; }
  };

  [[nodiscard]] result<void> check(const slot_claim& claim) const;
  [[nodiscard]] std::string stages() const;
  /// Of which a rank is used or held.
  [[nodiscard]] std::set<std::uint32_t> replicas_begun(std::string_view stage,
                                                       const std::vector<slot_use>& uses,
                                                       steady_time now) const;
  [[nodiscard]] result<slot_grant> renew(const slot_claim& claim, const std::vector<slot_use>& uses,
                                         steady_time now);
  [[nodiscard]] unexpected none_free(const slot_claim& claim, const std::vector<slot_use>& uses,
                                     steady_time now) const;
  [[nodiscard]] slot_grant grant(slot& one, const slot_claim& claim, steady_time now);
  [[nodiscard]] slot_grant told(const slot& one) const;

  std::string cluster_;
  std::vector<slot> slots_;
  std::chrono::milliseconds hold_;
  steady_time opens_{};
};

}  // namespace troupe::actors
