#include "verdict.hpp"

namespace troupe::engine_fuzz {

std::string_view to_string(part what) noexcept {
  switch (what) {
    case part::send: return "send";
    case part::receive: return "receive";
    case part::receive_again: return "second receive";
    case part::receive_late: return "late receive";
    case part::hold: return "hold";
    case part::release: return "release";
  }
  return "?";
}

std::optional<std::uint32_t> victim_of(const round& now) {
  for (const auto& one : now.acts)
    if (one.what == act_kind::die || one.what == act_kind::stand) return one.node;
  return std::nullopt;
}

bool has_standing(const round& now) {
  return std::ranges::any_of(now.acts, [](const act& one) { return one.what == act_kind::stand; });
}

namespace {

bool takes_part(const scenario& s, const request_plan& r, std::uint32_t node) {
  return s.is_prefill(node) || r.two_replicas || s.replica_of(node) == s.decode_replica_of(r);
}

void add_mishap(verdict& v, const scenario& s, const request_plan& r, std::uint32_t node,
                part what) {
  const bool victim = !s.sends(r, node) && s.rank_of(node) == r.rank;
  switch (r.what) {
    case mishap::decode_aborts:
      // With a retry window only that rank's part ends.
      if (!s.retries || (victim && what == part::receive)) v.failures = {errc::aborted};
      break;
    case mishap::prefill_aborts: v.failures = {errc::aborted}; break;
    case mishap::short_seal:
      v.may_succeed = s.retries && what != part::receive;
      if (!v.may_succeed) v.failures = {errc::out_of_range};
      // The send may have been given up once all receivers had gone.
      if (!s.retries && what == part::send) v.failures.push_back(errc::aborted);
      break;
    case mishap::decode_deadline:
      if (victim && what == part::receive) v.failures = {errc::deadline};
      if (!s.retries) v.failures = {errc::deadline, errc::aborted};
      break;
    case mishap::short_window:
      // The source goes on for other ranks, and for that rank once it asks for what exists.
      v.may_succeed = !(victim && what == part::receive);
      if (!v.may_succeed) v.failures = {errc::out_of_range};
      break;
    case mishap::released:
      v.may_succeed = what == part::release;
      if (!v.may_succeed) v.failures = {errc::aborted};
      // It has no deadline of its own, and the deployment's may be a few milliseconds.
      if (v.may_succeed && s.values_expire()) v.failures = {errc::deadline};
      break;
    case mishap::none:
    case mishap::prefill_dies:
    case mishap::decode_dies:
    case mishap::prefill_stands:
    case mishap::decode_stands: break;
  }
}

}  // namespace

verdict verdict_on(const scenario& s, const round& now, std::uint32_t request, std::uint32_t node,
                   part what) {
  const auto& r = now.requests[request];
  verdict v;
  if (what == part::receive_late) {
    v.may_succeed = false;
    v.failures = {errc::not_found};
  } else if (what == part::hold) {
    // The source may not exist yet, or no longer; a hold ends as the source does, or with its
    // receive.
    v.failures = {errc::not_found, errc::aborted, errc::deadline, errc::out_of_range};
  } else {
    add_mishap(v, s, r, node, what);
  }
  const auto victim = victim_of(now);
  if (!victim || !takes_part(s, r, *victim)) return v;
  // A killed node reports nothing; a stopped one finds out when it wakes.
  v.may_fail_anyhow = *victim == node;
  v.may_succeed = true;
  // With a retry window, a node that takes no part in what failed at another decode rank goes on.
  const bool apart =
      s.retries && !s.sends(r, *victim) && !s.sends(r, node) && what != part::receive_late;
  if (!apart) {
    // `stale_incarnation`: another process has the port of one that is gone.
    for (const auto code :
         {errc::peer_lost, errc::peer_unreachable, errc::aborted, errc::stale_incarnation})
      v.failures.push_back(code);
  }
  return v;
}

}  // namespace troupe::engine_fuzz
