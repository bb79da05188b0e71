#include "troupe/deploy/cli/cluster_look.hpp"

#include <algorithm>
#include <thread>
#include <utility>
#include <vector>

#include "troupe/actors/logging.hpp"
#include "troupe/actors/messages/node_roles.hpp"

namespace troupe::deploy::cli {

namespace {

/// Nodes asked at once: silent nodes delay the others by at most one timeout per this many of them.
constexpr std::size_t askers = 16;

/// Asks every registered node that may be there for its report, several at once.
void collect_reports(actors::cluster_client& cluster, cluster_status& status,
                     const std::atomic<bool>& cancelled) {
  const auto ask = [&](std::size_t first) {
    for (auto i = first; i < status.nodes.size() && !cancelled; i += askers) {
      auto& n = status.nodes[i];
      if (n.registered) n.report = cluster.report(n.member.node);
    }
  };
  std::vector<std::jthread> threads;  // joined even if a thread cannot be started
  for (std::size_t i = 0; i < std::min(askers, status.nodes.size()); ++i)
    threads.emplace_back(ask, i);
}

void add_missing(const cluster_address& at, cluster_status& status) {
  for (const auto& node : at.expected) {
    if (node.role == config::role::supervisor) continue;
    const auto known = std::ranges::any_of(
        status.nodes, [&](const auto& n) { return n.member.node.name == node.name; });
    if (known) continue;
    actors::member missing;
    missing.node.name = node.name;
    missing.node.stage = node.stage;
    missing.node.role = static_cast<std::uint8_t>(actors::node_role_of(node.role));
    missing.node.replica = node.replica;
    missing.node.rank = node.rank;
    missing.node.ranks = node.ranks();
    status.nodes.push_back(
        {std::move(missing), false,
         fail(errc::not_found, "has not registered with the supervisor; start it")});
  }
}

}  // namespace

result<actors::membership> members_of(actors::cluster_client& cluster, const cluster_address& at) {
  auto members = cluster.members();
  if (!members) return fail(at.explained(members.error()));
  if (at.cluster.empty() || members->cluster == at.cluster) return members;
  return fail(errc::invalid_config, "the supervisor at " + at.text() + " belongs to cluster `" +
                                        members->cluster + "`, but the file describes `" +
                                        at.cluster + "`; give the two clusters different ports");
}

result<cluster_status> look_at(actors::cluster_client& cluster, const cluster_address& at,
                               const std::atomic<bool>& cancelled) {
  auto members = members_of(cluster, at);
  if (!members) return fail(members.error());
  cluster_status status{at.text(), std::move(*members), {}};
  for (const auto& member : status.members.members)
    status.nodes.push_back({member, true, fail(errc::internal, "not asked")});
  collect_reports(cluster, status, cancelled);
  add_missing(at, status);
  std::ranges::sort(status.nodes, {}, [](const auto& n) { return n.member.node.name; });
  return status;
}

bool is_final(const error& why) noexcept {
  return why.code == errc::invalid_config || why.code == errc::version_mismatch ||
         why.code == errc::unauthorized;
}

void log_errors_only(const std::string& verb) {
  actors::log_options log;
  log.level = "error";
  log.node = verb;
  (void)actors::init_logging(log);
}

}  // namespace troupe::deploy::cli
