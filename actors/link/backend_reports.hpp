#pragma once

#include <string_view>
#include <vector>

#include "troupe/actors/cluster_messages.hpp"
#include "troupe/transport/endpoint.hpp"

namespace troupe::actors {

/// Every backend of an endpoint, in the order in which `auto` prefers them: as it is now, since a
/// device may have failed meanwhile.
[[nodiscard]] std::vector<backend_report> backend_reports(const transport::endpoint& endpoint);

/// Of the reason of what cannot be used: what it is, without what to do about it.
[[nodiscard]] std::string_view without_advice(std::string_view reason) noexcept;

}  // namespace troupe::actors
