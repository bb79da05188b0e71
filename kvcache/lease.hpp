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

/// What a lease is on; the owner of the table chooses the number (a transfer's id, say).
using lease_id = strong_id<struct lease_tag, std::uint64_t>;

/// Who holds what until when. A lease measures that its holder lives, so its holder is an
/// incarnation: a restarted node does not inherit. Time is monotonic and comes in. A lease whose
/// end has come is over, whether or not `expire` has collected it yet. Not thread-safe.
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

  /// `already_exists` while the id is held or over but not collected; `invalid_config` for the
  /// holder 0 or a duration that is not positive.
  [[nodiscard]] result<void> grant(lease_id id, incarnation holder, time_point now,
                                   duration length);
  /// Returns when the lease now ends; never earlier than before. `not_found`, `stale_incarnation`
  /// (another life's lease), `lease_expired`.
  [[nodiscard]] result<time_point> renew(lease_id id, incarnation holder, time_point now,
                                         duration length);
  /// What a heartbeat does: renews all that the holder has and is not over. Returns how many.
  std::size_t renew_all(incarnation holder, time_point now, duration length);
  /// Gives a lease up. `not_found`; `stale_incarnation` when it is another's.
  [[nodiscard]] result<void> end(lease_id id, incarnation holder);
  /// The holder died: ends all it has, and returns them, ascending.
  [[nodiscard]] std::vector<lease_id> end_holder(incarnation holder);
  /// Collects those whose end is not after `now`, earliest first.
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
