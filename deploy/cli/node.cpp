#include <algorithm>
#include <chrono>
#include <iostream>
#include <memory>
#include <string>
#include <utility>

#include <CLI/CLI.hpp>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include "troupe/actors/engine.hpp"
#include "troupe/actors/logging.hpp"
#include "troupe/actors/supervisor.hpp"
#include "troupe/actors/system.hpp"
#include "troupe/config/resolve.hpp"
#include "troupe/deploy/child_process.hpp"
#include "troupe/deploy/cli/announcement.hpp"
#include "troupe/deploy/cli/deployment_file.hpp"
#include "troupe/deploy/cli/process_name.hpp"
#include "troupe/deploy/cli/stop_signals.hpp"
#include "troupe/deploy/cli/verbs.hpp"
#include "troupe/deploy/reference_engine/reference_engine.hpp"

namespace troupe::deploy::cli {

namespace {

using std::chrono::milliseconds;

/// A good end takes a second or two. What takes longer than this hangs, and ends by the alarm.
constexpr unsigned stop_patience_s = 10;
/// How often a node that runs looks whether its cluster still wants it.
constexpr milliseconds standing_interval{500};

struct node_arguments {
  std::string file;
  std::string name;
  actors::log_options log;
  std::uint16_t supervisor_port{0};  ///< 0: the deployment's
  int announce_fd{-1};
};

/// From now on nothing can hang: the next signal, or the alarm, ends the process at once.
void expect_the_end(stop_signals& signals) {
  signals.restore();
  ::alarm(stop_patience_s);
}

// -- what runs in the process

result<void> run_supervisor(const config::deployment& deployment, const announcer& tell,
                            stop_signals& signals) {
  actors::actor_host_options options;
  options.network_heartbeat = deployment.supervisor.heartbeat_interval;
  options.connection_timeout = 2 * deployment.supervisor.heartbeat_timeout;
  actors::actor_host host{options};
  auto supervises = actors::supervisor_options_from(deployment);
  auto store = actors::open_membership_store(deployment);
  if (!store) return fail(store.error());
  supervises.store = std::move(*store);
  const auto supervisor = actors::spawn_supervisor(host.system(), std::move(supervises));
  const auto& at = deployment.supervisor;
  const auto port = host.publish(supervisor, at.host, at.port);
  if (!port) return fail(port.error());
  actors::logger("supervisor")
      ->info("supervisor of cluster '{}' listens at {}:{}", deployment.cluster, at.host, *port);
  tell.say({announcement::kind::listening, at.host, *port});
  while (!signals.wait(milliseconds{-1})) {
  }
  expect_the_end(signals);
  if (!host.shutdown()) return fail(errc::internal, "some actors did not end in time");
  return {};
}

/// Serves a node that is started until the signal comes, it is drained, or it can serve nobody any
/// more: another process has taken its place (`stale_incarnation`), or it has crashed inside
/// (`internal`).
result<void> serve(engine& node, const announcer& tell, stop_signals& signals) {
  const auto self = node.report().node;
  tell.say({announcement::kind::listening, self.host, self.port});
  bool told = false;
  bool signalled = false;
  bool drained = false;
  result<void> ended;
  while (!signalled && !drained && ended) {
    // Until it is registered both ends are waited for in turns; the node logs why it is not.
    const auto standing = node.wait_registered(milliseconds{told ? 0 : 100});
    if (standing && !told) {
      tell.say({announcement::kind::registered, {}, 0});
      told = true;
    }
    if (!standing && standing.error().code != errc::deadline) {  // that is: not yet
      ended = fail(standing.error());
    } else if (node.draining() == drain_standing::drained) {
      drained = true;
      actors::logger("node")->info("{} was drained and leaves", self.name);
      tell.say({announcement::kind::drained, {}, 0});
    } else {
      signalled = signals.wait(told ? standing_interval : milliseconds{0});
    }
  }
  expect_the_end(signals);
  return ended;
}

result<void> run_reference(const config::deployment& deployment, const std::string& name,
                           const announcer& tell, stop_signals& signals) {
  auto engine = reference::reference_engine::start(deployment, name);
  if (!engine) return fail(engine.error());
  auto served = serve((*engine)->node(), tell, signals);
  (*engine)->stop();
  return served;
}

result<void> run_store(const config::deployment& deployment, const std::string& name,
                       const announcer& tell, stop_signals& signals) {
  auto node = engine::start(deployment, name);
  if (!node) return fail(node.error());
  auto served = serve(**node, tell, signals);
  (*node)->stop();
  return served;
}

result<void> run_role(const config::deployment& deployment, const config::resolved_node& node,
                      const announcer& tell, stop_signals& signals) {
  switch (node.role) {
    case config::role::supervisor: return run_supervisor(deployment, tell, signals);
    case config::role::store: return run_store(deployment, node.name, tell, signals);
    case config::role::prefill:
    case config::role::decode: return run_reference(deployment, node.name, tell, signals);
  }
  return fail(errc::internal, "node of an unknown role");
}

// -- before it runs

/// The node, if it can run here; else the sentence that says why not.
result<config::resolved_node> find_runnable(const config::deployment& deployment,
                                            const std::string& name) {
  const auto nodes = config::resolve(deployment);
  const auto* found = config::find_node(nodes, name);
  if (found == nullptr) {
    std::string names;
    for (const auto& node : nodes) names += (names.empty() ? "" : ", ") + node.name;
    return fail(errc::not_found, "the deployment has no node " + name + "; it has " + names);
  }
  if (!found->local)
    return fail(errc::invalid_config, name + " belongs to host " + found->host +
                                          ", which is not this machine; start it there");
  if (found->engine == config::engine_kind::external)
    return fail(errc::invalid_config,
                name +
                    " has `engine: external`: it is a process of yours that links "
                    "troupe::actors and calls troupe::engine::start(deployment, \"" +
                    name + "\"); see troupe/actors/engine.hpp and deploy/reference_engine");
  return *found;
}

exit_code run_node(node_arguments& given) {
  auto deployment = load_or_complain(given.file);
  if (!deployment) return exit_code::usage;
  if (given.supervisor_port != 0) {
    auto& supervisor = deployment->supervisor;
    // A port that the OS chose is no name for what is kept: another run may get it.
    if (supervisor.port == 0 && supervisor.state_file == "auto") supervisor.state_file = "none";
    supervisor.port = given.supervisor_port;
  }
  const auto node = find_runnable(*deployment, given.name);
  if (!node) {
    std::cerr << "troupe node: " << to_string(node.error()) << "\n";
    return exit_code::usage;
  }
  if (node->role != config::role::supervisor && deployment->supervisor.port == 0) {
    std::cerr << "troupe node: supervisor.port is 0 in " << given.file
              << ", so nobody knows where the supervisor listens; give it a port there, or the "
                 "one it was given with --supervisor-port\n";
    return exit_code::usage;
  }
  name_this_process(process_name(node->name));
  given.log.node = given.name;
  if (auto logging = actors::init_logging(given.log); !logging) {
    std::cerr << "troupe node: " << to_string(logging.error()) << "\n";
    return exit_code::usage;
  }
  const announcer tell{given.announce_fd};
  stop_signals signals;
  if (const auto ran = run_role(*deployment, *node, tell, signals); !ran) {
    actors::logger("node")->error("{}", to_string(ran.error()));
    tell.say({announcement::kind::failed, to_string(ran.error()), 0});
    if (!given.log.file.empty() || given.log.level == "off")
      std::cerr << "troupe node: " << given.name << ": " << to_string(ran.error()) << "\n";
    return ran.error().code == errc::stale_incarnation ? exit_code::replaced : exit_code::failed;
  }
  actors::logger("node")->info("{} stopped", given.name);
  return exit_code::ok;
}

}  // namespace

void add_node(CLI::App& app, exit_code& code) {
  auto* verb = app.add_subcommand(
      "node",
      "Run one node of a deployment in the foreground until Ctrl-C or SIGTERM, or until it was\n"
      "drained: the supervisor, a store, or a stage with the reference engine. A second signal "
      "ends\n"
      "it at once. Without a supervisor it waits, says so, and asks again every "
      "heartbeat_interval\n"
      "until it is stopped. A supervisor keeps what must survive it in the file that\n"
      "supervisor.state_file names.");
  const auto given = std::make_shared<node_arguments>();
  verb->add_option("FILE", given->file, "The deployment file (YAML)")->required();
  verb->add_option("--name", given->name, "Which node, as `troupe check FILE --nodes` lists them")
      ->required();
  verb->add_option("--log-level", given->log.level, "What is logged")
      ->check(CLI::IsMember({"trace", "debug", "info", "warn", "error", "off"}))
      ->capture_default_str();
  verb->add_option(
      "--log-file", given->log.file,
      "Where to, rotated at 64 MiB, 3 old ones kept; its folders are made where they are\n"
      "missing (standard error)");
  verb->add_option("--supervisor-port", given->supervisor_port,
                   "Instead of the one in FILE; for a supervisor that was told to listen anywhere")
      ->check(CLI::Range(1, 65'535));
  // How `troupe up` hears from the nodes it starts.
  verb->add_option("--announce-fd", given->announce_fd)->group("");
  verb->callback([given, &code] { code = run_node(*given); });
}

}  // namespace troupe::deploy::cli
