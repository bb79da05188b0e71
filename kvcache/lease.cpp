#include "troupe/kvcache/lease.hpp"

#include <string>

#include "troupe/kvcache/saturating_time.hpp"

namespace troupe::kvcache {
namespace {

std::string name(lease_id id) {
  return "lease " + std::to_string(id.value);
}

}  // namespace

result<void> lease_table::grant(lease_id id, incarnation holder, time_point now, duration length) {
  if (holder.value == 0 || length <= duration::zero()) {
    return fail(errc::invalid_config,
                name(id) + " needs a holder that is not 0 and a length that is positive");
  }
  const time_point end = after(now, length);
  if (!leases_.emplace(id, lease{holder, end}).second) {
    return fail(errc::already_exists, name(id) + " is held already; end it first");
  }
  ends_.emplace(end, id);
  by_holder_[holder].insert(id);
  return {};
}

result<lease_table::time_point> lease_table::renew(lease_id id, incarnation holder, time_point now,
                                                   duration length) {
  const auto found = leases_.find(id);
  if (found == leases_.end()) {
    return fail(errc::not_found, name(id) + " is not held; it has ended or was never granted");
  }
  if (found->second.holder != holder) {
    return fail(errc::stale_incarnation, name(id) + " belongs to another life of its holder");
  }
  if (found->second.end <= now) {
    return fail(errc::lease_expired, name(id) + " is over; its holder was not heard of in time");
  }
  return extend(id, found->second, now, length);
}

lease_table::time_point lease_table::extend(lease_id id, lease& held, time_point now,
                                            duration length) {
  const time_point end = after(now, length);
  if (end > held.end) {
    ends_.erase({held.end, id});
    held.end = end;
    ends_.emplace(end, id);
  }
  return held.end;
}

std::size_t lease_table::renew_all(incarnation holder, time_point now, duration length) {
  const auto found = by_holder_.find(holder);
  if (found == by_holder_.end()) return 0;
  std::size_t renewed = 0;
  for (const auto id : found->second) {
    lease& held = leases_.find(id)->second;
    if (held.end <= now) continue;
    extend(id, held, now, length);
    ++renewed;
  }
  return renewed;
}

result<void> lease_table::end(lease_id id, incarnation holder) {
  const auto found = leases_.find(id);
  if (found == leases_.end()) {
    return fail(errc::not_found, name(id) + " is not held; it has ended or was never granted");
  }
  if (found->second.holder != holder) {
    return fail(errc::stale_incarnation, name(id) + " belongs to another life of its holder");
  }
  drop(found);
  return {};
}

std::vector<lease_id> lease_table::end_holder(incarnation holder) {
  const auto found = by_holder_.find(holder);
  if (found == by_holder_.end()) return {};
  std::vector<lease_id> ended{found->second.begin(), found->second.end()};
  for (const auto id : ended) drop(leases_.find(id));
  return ended;
}

std::vector<lease_id> lease_table::expire(time_point now) {
  std::vector<lease_id> over;
  while (!ends_.empty() && ends_.begin()->first <= now) {
    over.push_back(ends_.begin()->second);
    drop(leases_.find(over.back()));
  }
  return over;
}

void lease_table::drop(table::iterator at) {
  const lease_id id = at->first;
  ends_.erase({at->second.end, id});
  const auto holder = by_holder_.find(at->second.holder);
  holder->second.erase(id);
  if (holder->second.empty()) by_holder_.erase(holder);
  leases_.erase(at);
}

std::optional<lease_table::time_point> lease_table::next_end() const {
  if (ends_.empty()) return std::nullopt;
  return ends_.begin()->first;
}

std::optional<incarnation> lease_table::holder_of(lease_id id) const {
  const auto found = leases_.find(id);
  if (found == leases_.end()) return std::nullopt;
  return found->second.holder;
}

}  // namespace troupe::kvcache
