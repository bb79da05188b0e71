#include <atomic>
#include <chrono>
#include <iostream>
#include <memory>
#include <string>

#include <CLI/CLI.hpp>

#include "troupe/config/printable.hpp"
#include "troupe/config/units.hpp"
#include "troupe/deploy/cli/cluster_look.hpp"
#include "troupe/deploy/cli/status_watch.hpp"
#include "troupe/deploy/cli/verbs.hpp"

namespace troupe::deploy::cli {

namespace {

using std::chrono::milliseconds;

struct status_arguments {
  std::string where;
  bool json{false};
  bool watch{false};
  std::string interval{"1s"};
  std::uint32_t timeout_ms{3000};
};

result<cluster_status> ask_cluster(const cluster_address& at, milliseconds timeout) {
  auto cluster = actors::cluster_client::connect(at.client(timeout));
  if (!cluster) return fail(at.explained(cluster.error()));
  const std::atomic<bool> never{false};
  return look_at(**cluster, at, never);
}

exit_code show_once(const cluster_address& at, const status_arguments& given) {
  const auto status = ask_cluster(at, milliseconds{given.timeout_ms});
  if (!status) {
    std::cerr << "troupe status: " << config::printable(to_string(status.error())) << "\n";
    return exit_code::failed;
  }
  if (given.json) {
    std::cout << to_json(*status) << "\n";
  } else {
    print_tables(*status, std::cout);
  }
  return status->complete() ? exit_code::ok : exit_code::incomplete;
}

exit_code run_status(const status_arguments& given) {
  const auto at = cluster_at("status", given.where);
  if (!at) return exit_code::usage;
  log_errors_only("status");
  if (!given.watch) return show_once(*at, given);
  return watch_status(*at,
                      {given.json ? watch_form::json : watch_form::tables,
                       *config::parse_duration(given.interval), milliseconds{given.timeout_ms}});
}

/// The complaint about an interval; empty if it is valid.
std::string complaint_of_interval(const std::string& text) {
  const auto time = config::parse_duration(text);
  const bool good = time && *time >= min_watch_interval && *time <= max_watch_interval;
  return good ? std::string{} : "takes a duration from 100ms to 1h, like 2s, found `" + text + "`";
}

}  // namespace

void add_status(CLI::App& app, exit_code& code) {
  auto* verb = app.add_subcommand(
      "status",
      "Show a running cluster: nodes and their states, links with the backend in use and why it\n"
      "was chosen, pools, transfers. Ends with 3 when not every node is up; a node that does not\n"
      "answer is shown with the reason. With --watch it goes on until Ctrl-C and ends with 0.");
  const auto given = std::make_shared<status_arguments>();
  verb->add_option("TARGET", given->where, "The deployment file, or HOST:PORT of the supervisor")
      ->required();
  verb->add_flag("--json", given->json,
                 "One JSON object instead of tables; with --watch one per line");
  auto* watch = verb->add_flag(
      "--watch,-w", given->watch,
      "Look repeatedly, with what each node moved per second since the last look: the tables\n"
      "are drawn in place on a terminal, cut to its window, and one after another elsewhere");
  verb->add_option("--interval", given->interval, "How often to look, from 100ms to 1h")
      ->check(complaint_of_interval)
      ->needs(watch)
      ->capture_default_str();
  verb->add_option("--timeout-ms", given->timeout_ms, "How long each node may take to answer")
      ->check(CLI::Range(1, 600'000))
      ->capture_default_str();
  verb->callback([given, &code] { code = run_status(*given); });
}

}  // namespace troupe::deploy::cli
