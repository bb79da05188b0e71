#pragma once

#include <string_view>
#include <vector>

#include "troupe/actors/cluster_messages.hpp"
#include "troupe/transport/endpoint.hpp"

namespace troupe::actors {

/// The present state of every backend of an endpoint (a device may have failed since the start), in
/// the order in which `auto` prefers them.
[[nodiscard]] std::vector<backend_report> backend_reports(const transport::endpoint& endpoint);

/// The cause alone from the reason why a backend is unusable, without the advice that follows it.
[[nodiscard]] std::string_view without_advice(std::string_view reason) noexcept;

}  // namespace troupe::actors
