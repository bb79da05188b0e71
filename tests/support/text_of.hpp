#pragma once

#include <fstream>
#include <sstream>
#include <string>

namespace troupe::testing {

/// The content of a file; empty if it cannot be read.
inline std::string text_of(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream{path}.rdbuf();
  return text.str();
}

}  // namespace troupe::testing
