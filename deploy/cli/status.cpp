#include <algorithm>
#include <chrono>
#include <iostream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>

#include "troupe/actors/cluster_client.hpp"
#include "troupe/actors/logging.hpp"
#include "troupe/deploy/cli/cluster_address.hpp"
#include "troupe/deploy/cli/status_report.hpp"
#include "troupe/deploy/cli/verbs.hpp"

namespace troupe::deploy::cli {

namespace {

/// Nodes that are asked at once: those that do not answer make the others wait no longer than one
/// timeout for every so many of them.
constexpr std::size_t askers = 16;

struct status_arguments {
  std::string where;
  bool json{false};
  std::uint32_t timeout_ms{3000};
};

std::uint8_t role_of(config::role role) {
  switch (role) {
    case config::role::supervisor: return static_cast<std::uint8_t>(actors::node_role::supervisor);
    case config::role::prefill: return static_cast<std::uint8_t>(actors::node_role::prefill);
    case config::role::decode: return static_cast<std::uint8_t>(actors::node_role::decode);
    case config::role::store: return static_cast<std::uint8_t>(actors::node_role::store);
  }
  return 0;
}

/// Asks every registered node that may be there for its report, several at once.
void collect_reports(actors::cluster_client& cluster, cluster_status& status) {
  const auto ask = [&](std::size_t first) {
    for (auto i = first; i < status.nodes.size(); i += askers) {
      auto& n = status.nodes[i];
      if (n.registered) n.report = cluster.report(n.member.node);
    }
  };
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < std::min(askers, status.nodes.size()); ++i)
    threads.emplace_back(ask, i);
  for (auto& t : threads) t.join();
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
    missing.node.role = role_of(node.role);
    missing.node.replica = node.replica;
    missing.node.rank = node.rank;
    missing.node.ranks = node.tensor_parallel;
    status.nodes.push_back(
        {std::move(missing), false,
         fail(errc::not_found, "has not registered with the supervisor; start it")});
  }
}

result<cluster_status> ask_cluster(const cluster_address& at, std::chrono::milliseconds timeout) {
  actors::cluster_client_options options;
  options.host = at.host;
  options.port = at.port;
  options.timeout = timeout;
  auto cluster = actors::cluster_client::connect(options);
  if (!cluster) return fail(cluster.error());
  auto members = (*cluster)->members();
  if (!members) return fail(members.error());
  if (!at.cluster.empty() && members->cluster != at.cluster) {
    return fail(errc::invalid_config, "the supervisor at " + at.text() + " is that of cluster `" +
                                          members->cluster + "`, the file describes `" +
                                          at.cluster + "`; give the two clusters different ports");
  }
  cluster_status status{at.text(), std::move(*members), {}};
  for (const auto& member : status.members.members)
    status.nodes.push_back({member, true, fail(errc::internal, "not asked")});
  collect_reports(**cluster, status);
  add_missing(at, status);
  std::ranges::sort(status.nodes, {}, [](const auto& n) { return n.member.node.name; });
  return status;
}

exit_code run_status(const status_arguments& given) {
  const auto at = cluster_at("status", given.where);
  if (!at) return exit_code::usage;
  // What is wrong is in the answer; the lines of the network layer would only repeat it.
  actors::log_options log;
  log.level = "error";
  log.node = "status";
  (void)actors::init_logging(log);
  const auto status = ask_cluster(*at, std::chrono::milliseconds{given.timeout_ms});
  if (!status) {
    std::cerr << "troupe status: " << to_string(status.error()) << "\n";
    return exit_code::failed;
  }
  if (given.json) {
    std::cout << to_json(*status) << "\n";
  } else {
    print_tables(*status, std::cout);
  }
  return status->complete() ? exit_code::ok : exit_code::incomplete;
}

}  // namespace

void add_status(CLI::App& app, exit_code& code) {
  auto* verb = app.add_subcommand(
      "status",
      "Show a running cluster: nodes and their states, links with the backend in use and why it\n"
      "was chosen, pools, transfers. Ends with 3 when not every node is up; a node that does not\n"
      "answer is shown with the reason.");
  const auto given = std::make_shared<status_arguments>();
  verb->add_option("TARGET", given->where, "The deployment file, or HOST:PORT of the supervisor")
      ->required();
  verb->add_flag("--json", given->json, "One JSON object instead of tables");
  verb->add_option("--timeout-ms", given->timeout_ms, "How long each node may take to answer")
      ->check(CLI::Range(1, 600'000))
      ->capture_default_str();
  verb->callback([given, &code] { code = run_status(*given); });
}

}  // namespace troupe::deploy::cli
