#include <algorithm>
#include <filesystem>
#include <iostream>
#include <memory>
#include <string>
#include <system_error>
#include <vector>

#include <CLI/CLI.hpp>

#include "troupe/config/resolve.hpp"
#include "troupe/deploy/cli/deployment_file.hpp"
#include "troupe/deploy/cli/node_group.hpp"
#include "troupe/deploy/cli/verbs.hpp"

namespace troupe::deploy::cli {

namespace {

struct up_arguments {
  std::string file;
  std::vector<std::string> only;
  std::string log_level{"info"};
  std::string log_dir;
};

// -- which nodes

/// The policy of the node's stage. Restarted nodes need a supervisor to come back to, so it is
/// restarted if any of them is.
config::restart_policy restart_of(const config::deployment& deployment,
                                  const config::resolved_node& node) {
  constexpr auto returns = config::restart_policy::on_failure;
  if (node.stage_index) return deployment.stages[*node.stage_index].restart;
  const auto any = std::ranges::find(deployment.stages, returns, &config::stage_config::restart);
  return any != deployment.stages.end() ? returns : config::restart_policy::never;
}

/// Refuses an open stage by name: `up` starts none of its nodes.
result<void> refuse_open(const config::deployment& deployment,
                         const std::vector<std::string>& only) {
  for (const auto& name : only) {
    const auto* stage = config::find_stage(deployment, name);
    if (stage != nullptr && stage->open)
      return fail(errc::invalid_config,
                  "--only `" + name +
                      "` is an open stage: its nodes are processes of yours that join by "
                      "themselves, and none of them is started here");
  }
  return {};
}

/// Refuses a supervisor that begins on demand: `up` would stop it again.
result<void> refuse_begun(const config::deployment& deployment,
                          const std::vector<std::string>& only) {
  if (!deployment.supervisor.begin ||
      std::ranges::find(only, std::string{"supervisor"}) == only.end())
    return {};
  return fail(
      errc::invalid_config,
      "--only `supervisor` with `supervisor: {begin: true}` in the file: the nodes begin it "
      "where they find none; `troupe node FILE --name supervisor` runs one here");
}

/// The members to start here, in order; or an error that says what is wrong with the choice.
result<std::vector<group_member>> choose(const config::deployment& deployment,
                                         const std::vector<std::string>& only) {
  if (auto named = refuse_open(deployment, only); !named) return fail(named.error());
  if (auto named = refuse_begun(deployment, only); !named) return fail(named.error());
  std::vector<group_member> chosen;
  std::string known;
  std::vector<bool> used(only.size());
  for (const auto& node : config::resolve(deployment)) {
    known += (known.empty() ? "" : ", ") + node.name;
    bool named = false;
    for (std::size_t i = 0; i < only.size(); ++i)
      if (!only[i].empty() && (only[i] == node.name || only[i] == node.stage)) {
        used[i] = named = true;
      }
    if (!only.empty() && !named) continue;
    const bool external = node.engine == config::engine_kind::external;
    if (!node.stage_index && deployment.supervisor.begin) {
      std::cout << "the supervisor is begun on " << node.host
                << " by the first node there that finds none, and stays when this command ends"
                << std::endl;
    } else if (node.local && !external) {
      chosen.push_back({node, restart_of(deployment, node)});
    } else if (external) {
      std::cout << node.name << " has `engine: external`: start it yourself" << std::endl;
    } else {
      std::cout << node.name << " belongs to host " << node.host << ": start it there" << std::endl;
    }
  }
  for (const auto& stage : deployment.stages)
    if (stage.open && only.empty())
      std::cout << "stage " << stage.name << " is open: its nodes join by themselves" << std::endl;
  for (std::size_t i = 0; i < only.size(); ++i)
    if (!used[i])
      return fail(errc::not_found,
                  "--only `" + only[i] + "` is neither a node nor a stage; there are " + known);
  if (chosen.empty())
    return fail(errc::not_found,
                "there is no node of this deployment to start here; the addresses of this machine "
                "do not match any of its hosts, or every engine is external or joins by itself");
  return chosen;
}

/// Makes the folder for the logs, before any node is started.
result<void> make_log_dir(const std::string& path) {
  if (path.empty()) return {};
  std::error_code why;
  std::filesystem::create_directories(path, why);
  if (!why && std::filesystem::is_directory(path, why)) return {};
  return fail(errc::invalid_config, "--log-dir " + path + " is not a folder and cannot be created" +
                                        (why ? ": " + why.message() : std::string{}) +
                                        "; name another one");
}

exit_code run_up(const up_arguments& given) {
  const auto deployment = load_or_complain(given.file);
  if (!deployment) return exit_code::usage;
  const auto nodes = choose(*deployment, given.only);
  if (!nodes) {
    complain(to_string(nodes.error()));
    return exit_code::usage;
  }
  const bool own_supervisor = nodes->front().node.role == config::role::supervisor;
  const auto& at = deployment->supervisor;
  if (!own_supervisor && at.port == 0 && !at.begin) {
    complain("supervisor.port is 0 in " + given.file +
             ", so the nodes cannot find a supervisor that another `up` started; give it a port "
             "there");
    return exit_code::usage;
  }
  if (auto made = make_log_dir(given.log_dir); !made) {
    complain(to_string(made.error()));
    return exit_code::usage;
  }
  const auto supervisor = at.port == 0 ? at.host : at.host + ":" + std::to_string(at.port);
  return node_group{{given.file, given.log_level, given.log_dir, supervisor}}.run(*nodes);
}

}  // namespace

void add_up(CLI::App& app, exit_code& code) {
  auto* verb = app.add_subcommand(
      "up",
      "Start every node of a deployment that belongs to this host, each in a process of its own,\n"
      "and stop them all in good order on Ctrl-C: all at once, and a node that has not ended\n"
      "within 8 s, or at a second Ctrl-C, is killed. When a node ends by itself, the command says\n"
      "so, stops the others and fails. A node whose stage has `restart: on-failure` is started\n"
      "again instead, after 100 ms at first and 10 s at most, unless it ended with 0 (it left), 2\n"
      "or 4; if it fails more than 5 times within 60 s, it is given up as above. (The supervisor\n"
      "is not given up: the nodes continue without it, and it is tried again every 10 s.) If the\n"
      "supervisor runs elsewhere and --only left it out, the nodes wait for it, and the command\n"
      "says so, until it answers or Ctrl-C. A supervisor that the file lets the nodes begin\n"
      "(`supervisor: {begin: true}`) is neither started nor stopped.");
  const auto given = std::make_shared<up_arguments>();
  verb->add_option("FILE", given->file, "The deployment file (YAML)")->required();
  // One value each: a list would swallow a FILE that comes after it.
  verb->add_option("--only", given->only, "Only this node or stage; may be given several times")
      ->allow_extra_args(false);
  verb->add_option("--log-level", given->log_level, "What the nodes log")
      ->check(CLI::IsMember({"trace", "debug", "info", "warn", "error", "off"}))
      ->capture_default_str();
  verb->add_option(
      "--log-dir", given->log_dir,
      "A folder for one NAME.log per node, created if missing (default: standard error of\n"
      "this command)");
  verb->callback([given, &code] { code = run_up(*given); });
}

}  // namespace troupe::deploy::cli
