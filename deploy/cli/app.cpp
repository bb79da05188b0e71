#include "troupe/deploy/cli/app.hpp"

#include <csignal>
#include <iostream>
#include <string>

#include <CLI/CLI.hpp>
#include <poll.h>
#include <unistd.h>

#include "troupe/deploy/child_process.hpp"
#include "troupe/deploy/cli/last_words.hpp"
#include "troupe/deploy/cli/verbs.hpp"
#include "troupe/kvcache/or_error.hpp"

namespace troupe::deploy::cli {

namespace {

constexpr const char* more_help = "Run with --help for more information.\n";

/// Complains of a first word that should be a verb and is not. CLI11 would only say that a verb is
/// missing, or nothing if --help follows.
bool complain_of_verb(const CLI::App& app, int argc, char** argv) {
  if (argc >= 2 && argv[1][0] == '-') return false;
  const std::string word{argc < 2 ? "" : argv[1]};
  if (word == "router") {
    std::cerr << "troupe: `router` is a verb of the Python package: install it with the extra "
                 "troupe-kv[router], then run python3 -m troupe.router\n"
              << more_help;
    return true;
  }
  std::string verbs;
  for (const auto* verb : app.get_subcommands([](const CLI::App*) { return true; })) {
    if (verb->get_name() == word) return false;
    verbs += (verbs.empty() ? "" : ", ") + verb->get_name();
  }
  std::cerr << "troupe: "
            << (argc < 2 ? std::string{"a verb is missing"} : "unknown verb `" + word + "`")
            << "; there are " << verbs << "\n"
            << more_help;
  return true;
}

/// Prints CLI11's message and maps its many codes to ours.
exit_code report(const CLI::App& app, const CLI::ParseError& what) {
  // CLI11 reports missing arguments first, which does not help a user who mistyped an option.
  if (const auto extra = app.remaining(true);
      !extra.empty() && what.get_name() == "RequiredError") {
    std::cerr << "The following " << (extra.size() == 1 ? "argument was" : "arguments were")
              << " not expected:";
    for (const auto& argument : extra) std::cerr << " " << argument;
    std::cerr << "\n" << more_help;
    return exit_code::usage;
  }
  const bool asked_for = app.exit(what) == 0;  // --help and --version are not errors
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
  add_ask(app, code);
  add_status(app, code);
  add_events(app, code);
  add_drain(app, code);
  add_certs(app, code);
  add_info(app, code);
  add_bench(app, code);
  for (auto* verb : app.get_subcommands({})) verb->footer(exit_codes_text);
  if (complain_of_verb(app, argc, argv)) return exit_code::usage;
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& what) {
    return report(app, what);
  }
  return code;
}

/// Whether all output was written. A reader that closed its end, or never was, wants no more.
bool said_all() {
  if (std::cout.flush()) return true;
  pollfd reader{STDOUT_FILENO, POLLOUT, 0};
  return ::poll(&reader, 1, 0) == 1 && (reader.revents & (POLLERR | POLLHUP | POLLNVAL)) != 0;
}

}  // namespace

int run(int argc, char** argv) {
  // A closed reader (`troupe check | head`) is a write error and must not kill this process.
  std::signal(SIGPIPE, SIG_IGN);
  // Exceeding a file size limit becomes an error with a sentence (ulimit -f also counts memory of
  // memfds).
  std::signal(SIGXFSZ, SIG_IGN);
  const last_words words;
  name_this_process("troupe");  // not `exe`, if it was started as /proc/self/exe
  try {
    const auto code = run_verbs(argc, argv);
    if (said_all() || code != exit_code::ok) return to_int(code);
    std::cerr << "troupe: not all of the standard output could be written\n";
    return to_int(exit_code::failed);
  } catch (...) {
    std::cerr << "troupe: " << to_string(exception_as_error("the command cannot continue")) << "\n";
    return to_int(exit_code::failed);
  }
}

}  // namespace troupe::deploy::cli
