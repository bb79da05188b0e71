#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "troupe/kvcache/ids.hpp"
#include "troupe/kvcache/result.hpp"

namespace troupe::kvcache {

/// Identifies a lease; the owner of the table chooses the number (the id of a transfer, for
/// instance).
using lease_id = strong_id<struct lease_tag, std::uint64_t>;

/// Which holder has which lease until when. A lease measures that its holder is alive, so the
/// holder is an incarnation: a restarted node does not inherit leases. Time is monotonic and passed
/// in. A lease is over once its end has passed, even before `expire` collects it. Not thread-safe.
///
/// | state | event                         | next                                        |
/// | ----- | ----------------------------- | ------------------------------------------- |
/// | none  | grant                         | held until now + duration                   |
/// | held  | renew, renew_all of holder    | held until the later of old and new end     |
/// | held  | end, end_holder (death)       | none                                        |
/// | held  | its end comes                 | over: not renewable; collected by `expire`  |
class lease_table {
 public:
  using time_point = std::chrono::steady_clock::time_point;
  using duration = std::chrono::steady_clock::duration;

  /// `already_exists` while the lease is held, or over but not collected; `invalid_config` for
  /// holder 0 or a duration that is not positive.
  [[nodiscard]] result<void> grant(lease_id id, incarnation holder, time_point now,
                                   duration length);
  /// Returns the new end of the lease, never earlier than the old one. `not_found`,
  /// `stale_incarnation` (the lease of another incarnation), `lease_expired`.
  [[nodiscard]] result<time_point> renew(lease_id id, incarnation holder, time_point now,
                                         duration length);
  /// For heartbeats: renews all leases of the holder that are not over. Returns how many.
  std::size_t renew_all(incarnation holder, time_point now, duration length);
  /// Gives a lease up. `not_found`; `stale_incarnation` if another holder has it.
  [[nodiscard]] result<void> end(lease_id id, incarnation holder);
  /// Ends all leases of a holder that died, and returns them, ascending.
  [[nodiscard]] std::vector<lease_id> end_holder(incarnation holder);
  /// Collects the leases whose end is not after `now`, earliest first.
  [[nodiscard]] std::vector<lease_id> expire(time_point now);

  /// When the next lease ends, if none is renewed.
  [[nodiscard]] std::optional<time_point> next_end() const;
  [[nodiscard]] std::optional<incarnation> holder_of(lease_id id) const;
  [[nodiscard]] std::size_t size() const noexcept { return leases_.size(); }

 private:
  struct lease {
    incarnation holder;
    time_point end;
  };
  using table = std::unordered_map<lease_id, lease>;

  time_point extend(lease_id id, lease& held, time_point now, duration length);
  void drop(table::iterator at);

  table leases_;
  std::set<std::pair<time_point, lease_id>> ends_;
  std::unordered_map<incarnation, std::set<lease_id>> by_holder_;
};

}  // namespace troupe::kvcache
