#pragma once

namespace troupe::deploy::cli {

/// The `troupe` command: reads the arguments, runs the verb, and returns the exit code
/// (exit_codes.hpp). Call it before any other thread is made.
[[nodiscard]] int run(int argc, char** argv);

}  // namespace troupe::deploy::cli
