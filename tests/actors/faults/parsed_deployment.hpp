#pragma once

/// A deployment parsed from text that a test writes as its user would.

#include <cstdio>
#include <string>

#include "troupe/config/parse.hpp"

namespace troupe::testing {

/// If the text is invalid, prints the errors and returns an empty deployment, with which nothing
/// starts.
inline config::deployment parsed_deployment(const std::string& text) {
  auto outcome = config::parse(text, "test.yaml");
  for (const auto& issue : outcome.issues) std::fprintf(stderr, "%s\n", to_string(issue).c_str());
  return outcome.value.value_or(config::deployment{});
}

}  // namespace troupe::testing
