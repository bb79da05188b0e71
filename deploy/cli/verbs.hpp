#pragma once

#include "troupe/deploy/cli/exit_codes.hpp"

namespace CLI {
class App;
}

/// One function per verb: each declares its arguments on `app` and stores its exit code in `code`.
/// Each verb is implemented in the file of its name.
namespace troupe::deploy::cli {

void add_ask(CLI::App& app, exit_code& code);
void add_check(CLI::App& app, exit_code& code);
void add_node(CLI::App& app, exit_code& code);
void add_up(CLI::App& app, exit_code& code);
void add_status(CLI::App& app, exit_code& code);
void add_events(CLI::App& app, exit_code& code);
void add_info(CLI::App& app, exit_code& code);
void add_bench(CLI::App& app, exit_code& code);
void add_certs(CLI::App& app, exit_code& code);
void add_drain(CLI::App& app, exit_code& code);
void add_demo(CLI::App& app, exit_code& code);

}  // namespace troupe::deploy::cli
