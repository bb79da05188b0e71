#include <array>
#include <cerrno>
#include <cstring>
#include <iostream>
#include <memory>
#include <string>
#include <utility>

#include <CLI/CLI.hpp>
#include <unistd.h>

#include "troupe/actors/secrets/door_user_secret.hpp"
#include "troupe/config/print.hpp"
#include "troupe/config/resolve.hpp"
#include "troupe/deploy/cli/deployment_file.hpp"
#include "troupe/deploy/cli/text_table.hpp"
#include "troupe/deploy/cli/verbs.hpp"

namespace troupe::deploy::cli {

namespace {

void print_nodes(const config::deployment& deployment) {
  using align = text_table::align;
  text_table table{{{"NODE"},
                    {"ROLE"},
                    {"STAGE"},
                    {"REPLICA", align::right},
                    {"RANK", align::right},
                    {"HOST"},
                    {"PORT", align::right},
                    {"ENGINE"},
                    {"HERE"}}};
  for (const auto& node : config::resolve(deployment))
    table.add({node.name, std::string{to_string(node.role)}, node.stage,
               std::to_string(node.replica),
               std::to_string(node.rank) + "/" + std::to_string(node.ranks()), node.host,
               node.port == 0 ? "any" : std::to_string(node.port),
               node.engine == config::engine_kind::none ? "-" : std::string{to_string(node.engine)},
               node.local ? "yes" : "no"});
  table.print(std::cout);
  for (const auto& stage : deployment.stages) {
    if (!stage.open) continue;
    const auto most = stage.open->max_nodes;
    std::cout << "stage " << stage.name << " is open to at most " << most
              << (most == 1 ? " node" : " nodes") << "\n";
  }
}

/// Reports missing security files. The file is valid nevertheless: it may be for another machine.
void say_what_is_missing(const std::string& file, const config::security_config& security) {
  const std::string none;
  const std::array<std::pair<const char*, const std::string*>, 4> named{
      {{"secret", security.is_secret_automatic() ? &none : &security.secret},
       {"certificate", &security.certificate},
       {"key", &security.key},
       {"ca", &security.ca}}};
  for (const auto& [key, path] : named) {
    if (path->empty() || ::access(path->c_str(), R_OK) == 0) continue;
    std::cerr
        << file << ": security." << key << ": " << *path << " cannot be read on this machine ("
        << std::strerror(errno)
        << "), so no node of this cluster can start here; `troupe certs init` makes these files\n";
  }
}

/// Prints what `auto` means here, as a comment in the printed deployment.
void say_which_secret(const config::deployment& deployment) {
  const auto& security = deployment.security;
  if (!security.is_secret_automatic()) return;
  const auto path = actors::user_secret_path(deployment.cluster);
  if (!path) {
    std::cout << "# " << path.error().message << "\n";
    return;
  }
  const bool is_there = ::access(path->c_str(), F_OK) == 0;
  std::cout << "# security.secret: auto is " << *path
            << (is_there ? ", which exists\n" : ", which the first process creates\n");
}

}  // namespace

void add_check(CLI::App& app, exit_code& code) {
  struct arguments {
    std::string file;
    bool nodes{false};
  };
  auto* verb = app.add_subcommand(
      "check",
      "Check a deployment file and print it with every default spelt out. Prints all errors\n"
      "together on standard error, as FILE:LINE: key: what was found and what was expected.");
  const auto given = std::make_shared<arguments>();
  verb->add_option("FILE", given->file, "The deployment file (YAML)")->required();
  verb->add_flag("--nodes", given->nodes,
                 "Print the nodes that the file describes instead, and which stages are open");
  verb->callback([given, &code] {
    const auto deployment = load_or_complain(given->file);
    if (!deployment) {
      code = exit_code::usage;
      return;
    }
    say_what_is_missing(given->file, deployment->security);
    if (given->nodes) {
      print_nodes(*deployment);
    } else {
      std::cout << config::print(*deployment);
      say_which_secret(*deployment);
    }
  });
}

}  // namespace troupe::deploy::cli
