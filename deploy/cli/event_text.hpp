#pragma once

#include <cstdint>
#include <string>

#include "troupe/actors/cluster_messages.hpp"

namespace troupe::deploy::cli {

/// The heading and the rows of a table printed row by row: columns have the usual width of names.
[[nodiscard]] std::string event_heading();
[[nodiscard]] std::string event_row(const actors::cluster_event& event);
/// One JSON object in one line, with the keys of the supervisor's log.
[[nodiscard]] std::string event_json(const actors::cluster_event& event,
                                     std::uint64_t supervisor_incarnation);

}  // namespace troupe::deploy::cli
