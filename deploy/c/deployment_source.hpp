#pragma once

#include <cstdint>

#include "troupe/config/deployment.hpp"
#include "troupe/kvcache/result.hpp"

namespace troupe::c {

/// The deployment given to a call: a file or a text of YAML, one of the two, and an optional other
/// address of its supervisor, in which case no supervisor is begun.
struct deployment_source {
  const char* file{nullptr};
  const char* text{nullptr};
  const char* host{nullptr};
  std::uint32_t port{0};
};

/// `invalid_config` with all issues, one a line.
[[nodiscard]] result<config::deployment> load_deployment(const deployment_source& from);

/// A port number given by C.
[[nodiscard]] result<std::uint16_t> port_of(std::uint32_t given, const char* name);

}  // namespace troupe::c
