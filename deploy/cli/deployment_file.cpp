#include "troupe/deploy/cli/deployment_file.hpp"

#include <iostream>
#include <utility>

#include "troupe/config/parse.hpp"

namespace troupe::deploy::cli {

std::optional<config::deployment> load_or_complain(const std::string& path) {
  auto outcome = config::load(path);
  if (outcome.value) return std::move(outcome.value);
  for (const auto& issue : outcome.issues) std::cerr << config::to_string(issue) << "\n";
  const auto count = outcome.issues.size();
  std::cerr << path << ": not valid, " << count << (count == 1 ? " issue" : " issues") << "\n";
  return std::nullopt;
}

}  // namespace troupe::deploy::cli
