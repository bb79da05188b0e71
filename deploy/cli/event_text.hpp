#pragma once

#include <cstdint>
#include <string>

#include "troupe/actors/cluster_messages.hpp"

namespace troupe::deploy::cli {

/// The heading of, and, rows that come one at a time: their columns are as wide as names usually are.
[[nodiscard]] std::string event_heading();
[[nodiscard]] std::string event_row(const actors::cluster_event& event);
/// One object in one line, with the keys of the supervisor's log.
[[nodiscard]] std::string event_json(const actors::cluster_event& event,
                                     std::uint64_t supervisor_incarnation);

}  // namespace troupe::deploy::cli
