#pragma once

/// Questions about one member in a list of the cluster's members.

#include <cstddef>
#include <string_view>

#include "troupe/actors/cluster_messages.hpp"

namespace troupe::actors {

/// The reason of a node that is down by its own report begins with this. No other reason does: all
/// others are the supervisor's own words.
inline constexpr std::string_view report_prefix = "reports: ";

/// Whether a member is down by its own report. Its process lives: transfers with it go on.
[[nodiscard]] bool reports_failure(const member& m) noexcept;

/// Whether the cluster takes that life for dead: it is down, and not by its own report.
[[nodiscard]] bool is_lost(const member& m) noexcept;
/// Whether the name has the form of a node's name in an open stage. No file gives such a name.
[[nodiscard]] bool is_open_name(std::string_view name);
/// The node of that name, or null. The pointer is into `all`.
[[nodiscard]] const member* find_member(const membership& all, std::string_view name) noexcept;

/// The longest reason that a node may give for its failure, in characters.
inline constexpr std::size_t max_failure = 200;

}  // namespace troupe::actors
