#include "troupe/deploy/cli/app.hpp"

#include <csignal>
#include <exception>
#include <iostream>

#include <CLI/CLI.hpp>

#include "troupe/deploy/cli/verbs.hpp"

namespace troupe::deploy::cli {

namespace {

/// What CLI11 has to say goes out; its many codes become ours.
exit_code report(const CLI::App& app, const CLI::ParseError& what) {
  const bool asked_for = app.exit(what) == 0;  // --help and --version are no errors
  return asked_for ? exit_code::ok : exit_code::usage;
}

exit_code run_verbs(int argc, char** argv) {
  CLI::App app{"Troupe moves KV caches between prefill and decode engines.", "troupe"};
  app.set_version_flag("--version", TROUPE_VERSION);
  app.require_subcommand(1);
  app.footer(exit_codes_text);
  auto code = exit_code::ok;
  add_demo(app, code);
  add_up(app, code);
  add_node(app, code);
  add_check(app, code);
  add_status(app, code);
  add_info(app, code);
  add_bench(app, code);
  for (auto* verb : app.get_subcommands({})) verb->footer(exit_codes_text);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& what) {
    return report(app, what);
  }
  return code;
}

}  // namespace

int run(int argc, char** argv) {
  // A reader that went away (`troupe check | head`) is an error of a write, not the end of us.
  std::signal(SIGPIPE, SIG_IGN);
  try {
    return to_int(run_verbs(argc, argv));
  } catch (const std::exception& what) {
    std::cerr << "troupe: internal: " << what.what() << "\n";
    return to_int(exit_code::failed);
  }
}

}  // namespace troupe::deploy::cli
