#include "troupe/actors/membership/placement_epochs.hpp"

#include <string>

#include "troupe/actors/messages/member_list.hpp"

namespace troupe::actors {

namespace {

/// The node, if that life of it is shown (0: any life), else null.
const member* find(const membership& seen, std::string_view node, std::uint64_t incarnation) {
  const member* m = find_member(seen, node);
  return m != nullptr && (incarnation == 0 || m->node.incarnation == incarnation) ? m : nullptr;
}

error taken_in_since(std::string_view node, std::uint64_t registered, std::uint64_t placed) {
  return {errc::stale_incarnation,
          std::string{node} + " was taken into the cluster at epoch " + std::to_string(registered) +
              ", after the placement of epoch " + std::to_string(placed) +
              ", so that what was placed there before is void; place the request again"};
}

}  // namespace

std::optional<error> check_placement(const membership& seen, std::string_view node,
                                     std::uint64_t incarnation, membership_mark placed) {
  if (placed.by == 0 || placed.by != seen.supervisor_incarnation) return std::nullopt;
  const member* m = find(seen, node, incarnation);
  if (m == nullptr) {
    // A node that joined an open stage is forgotten some time after it went down.
    const bool forgotten = is_open_name(node) && find_member(seen, node) == nullptr;
    if (!forgotten || seen.epoch < placed.at) return std::nullopt;
    return error{errc::stale_incarnation,
                 std::string{node} + " is not a member at epoch " + std::to_string(seen.epoch) +
                     ", which voids the placement of epoch " + std::to_string(placed.at) +
                     "; place the request again"};
  }
  if (m->registered > placed.at) return taken_in_since(node, m->registered, placed.at);
  if (!is_lost(*m) || seen.epoch < placed.at) return std::nullopt;
  return error{errc::stale_incarnation,
               std::string{node} + " is down at epoch " + std::to_string(seen.epoch) +
                   (m->reason.empty() ? "" : " (" + m->reason + ")") +
                   ", which voids the placement of epoch " + std::to_string(placed.at) +
                   "; place the request again"};
}

std::optional<error> check_own_placement(const membership& seen, const node_info& self,
                                         membership_mark taken_in, membership_mark placed) {
  const bool newer_than_seen =
      seen.supervisor_incarnation != taken_in.by || seen.epoch < taken_in.at;
  if (!newer_than_seen) return check_placement(seen, self.name, self.incarnation, placed);
  if (placed.by == 0 || placed.by != taken_in.by || taken_in.at <= placed.at) return std::nullopt;
  return taken_in_since(self.name, taken_in.at, placed.at);
}

std::optional<error> check_dialler(const membership& seen, const link_request& request) {
  if (request.supervisor_incarnation != seen.supervisor_incarnation) return std::nullopt;
  const member* m = find(seen, request.from.name, request.from.incarnation);
  if (m == nullptr || !is_lost(*m) || request.registered_epoch > seen.epoch) return std::nullopt;
  return error{errc::stale_incarnation,
               "the cluster took " + request.from.name + " for dead by epoch " +
                   std::to_string(seen.epoch) + (m->reason.empty() ? "" : " (" + m->reason + ")") +
                   ", and it registered last at epoch " + std::to_string(request.registered_epoch) +
                   "; it has to register again first"};
}

}  // namespace troupe::actors
