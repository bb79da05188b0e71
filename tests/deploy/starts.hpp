#pragma once

/// Processes to be started by tests that deny them a resource.

#include <algorithm>
#include <string>
#include <vector>

namespace troupe::testing {

struct start {
  const char* name;
  const char* program;
  std::vector<std::string> arguments;  ///< `FILE` stands for the deployment file
  const char* serving;                 ///< its output once it serves; null if it ends by itself

  [[nodiscard]] std::vector<std::string> arguments_for(const std::string& file) const {
    auto all = arguments;
    std::ranges::replace(all, "FILE", file);
    return all;
  }
};

inline const start start_of_supervisor{"supervisor",
                                       TROUPE_COMMAND,
                                       {"node", "FILE", "--name", "supervisor"},
                                       "listens at 127.0.0.1:"};
/// Of a deployment with `cache`, a stage of stores.
inline const start start_of_store{
    "store", TROUPE_COMMAND, {"node", "FILE", "--name", "cache-0"}, "not registered"};
inline const start start_of_demo{
    "demo",
    TROUPE_COMMAND,
    {"demo", "--requests", "1", "--max-tokens", "2", "--prompt", "short"},
    nullptr};
/// `embedded_start.cpp` with a store of that stage.
inline const start start_embedded{"embedded", EMBEDDED_START, {"FILE", "cache-0"}, nullptr};

}  // namespace troupe::testing
