#include "troupe/actors/client/request_blame.hpp"

#include <algorithm>

#include "troupe/actors/messages/member_list.hpp"

namespace troupe::actors {

namespace {

/// Whether the error concerns a peer or its link, not the request.
bool tells_of_a_loss(errc code) {
  return code == errc::peer_lost || code == errc::peer_unreachable || code == errc::link_broken ||
         code == errc::stale_incarnation || code == errc::lease_expired;
}

bool is_absent(const member& m) {
  const auto state = node_state_from(m.state);
  return state == node_state::suspect || state == node_state::leaving || state == node_state::down;
}

const failed_call& explanation(const std::vector<failed_call>& failed) {
  const auto rank = [](const failed_call& one) {
    if (one.reach != call_reach::answered) return 0;
    if (!tells_of_a_loss(one.why.code) && !may_follow_from_a_loss(one.why.code)) return 1;
    return tells_of_a_loss(one.why.code) ? 2 : 3;
  };
  return *std::ranges::min_element(failed, {}, rank);
}

}  // namespace

bool may_follow_from_a_loss(errc code) {
  return code == errc::aborted || code == errc::deadline || code == errc::not_found;
}

bool is_lost(const membership& seen, const placement& where, const node_info& node) {
  const bool same_count = seen.supervisor_incarnation == where.supervisor_incarnation;
  if (same_count && seen.epoch < where.epoch) return false;  // older news
  const member* m = find_member(seen, node.name);
  if (m == nullptr) return same_count && is_open_name(node.name);  // joined, then forgotten
  // A node that reports its own failure is alive, and the work that it has begun continues.
  return m->node.incarnation != node.incarnation || is_lost(*m) ||
         (same_count && m->registered > where.epoch);
}

attempt_verdict judge(const membership& seen, const placement& where,
                      const std::vector<failed_call>& failed) {
  const failed_call& cause = explanation(failed);
  attempt_verdict verdict{cause.why, {}};
  const bool of_itself = cause.reach == call_reach::answered && !tells_of_a_loss(cause.why.code) &&
                         !may_follow_from_a_loss(cause.why.code);
  if (of_itself) return verdict;
  for (const auto& one : failed) {
    if (one.reach != call_reach::answered) verdict.lost.push_back(one.node);
  }
  for (const auto* nodes : {&where.prefill, &where.decode}) {
    for (const auto& node : *nodes) {
      const member* m = find_member(seen, node.name);
      const bool gone = is_lost(seen, where, node) || (m != nullptr && is_absent(*m));
      if (gone && std::ranges::find(verdict.lost, node.name) == verdict.lost.end()) {
        verdict.lost.push_back(node.name);
      }
    }
  }
  if (!verdict.lost.empty() || !tells_of_a_loss(cause.why.code)) return verdict;
  verdict.guessed = true;
  const auto& other = cause.side == carried_side::prefill ? where.decode : where.prefill;
  for (const auto& node : other) verdict.lost.push_back(node.name);
  return verdict;
}

}  // namespace troupe::actors
