#pragma once

#include <cstdint>
#include <string>

#include "troupe/config/deployment.hpp"
#include "troupe/kvcache/result.hpp"

namespace troupe::actors {

/// The address from which this machine reaches `host`, by its system's routes; a loopback address
/// if `host` is one. Sends nothing. Resolves names, so it may take seconds. `peer_unreachable`:
/// there is no such host, or no route to it.
[[nodiscard]] result<std::string> address_towards(const std::string& host, std::uint16_t port);

/// The address of a node on `host` of a stage: `host` itself, or what `auto` means here.
[[nodiscard]] result<std::string> address_of(const std::string& host,
                                             const config::supervisor_config& supervisor);

}  // namespace troupe::actors
