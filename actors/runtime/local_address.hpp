#pragma once

#include <cstdint>
#include <string>

#include "troupe/config/deployment.hpp"
#include "troupe/kvcache/result.hpp"

namespace troupe::actors {

/// The address of this machine from which it reaches `host`, as the routes of its system say: a
/// loopback address where `host` is one. Sends nothing. Resolves names, so it may take seconds.
/// `peer_unreachable`: there is no such host, or no route to it.
[[nodiscard]] result<std::string> address_towards(const std::string& host, std::uint16_t port);

/// The host of a node that stands on `host` of a stage: itself, or what `auto` means here.
[[nodiscard]] result<std::string> address_of(const std::string& host,
                                             const config::supervisor_config& supervisor);

}  // namespace troupe::actors
