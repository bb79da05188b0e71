#pragma once

#include <cstdint>
#include <string>

#include "troupe/config/deployment.hpp"
#include "troupe/kvcache/result.hpp"

namespace troupe::c {

/// What a call is given of a deployment: a file or a text of YAML, one of the two, and another place
/// of its supervisor, which is not begun then.
struct deployment_source {
  const char* file{nullptr};
  const char* text{nullptr};
  const char* host{nullptr};
  std::uint32_t port{0};
};

/// `invalid_config` with all that is wrong with it, one issue a line.
[[nodiscard]] result<config::deployment> load_deployment(const deployment_source& from);

/// A port of C.
[[nodiscard]] result<std::uint16_t> port_of(std::uint32_t given, const char* name);

}  // namespace troupe::c
