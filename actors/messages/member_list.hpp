#pragma once

/// What a list of the cluster's members says of one of them.

#include <cstddef>
#include <string_view>

#include "troupe/actors/cluster_messages.hpp"

namespace troupe::actors {

/// With which the reason of a node begins that is down by its own report. No other reason begins so: all
/// of them are the supervisor's own words.
inline constexpr std::string_view report_prefix = "reports: ";

/// Whether a member is down by its own report. Its process lives: transfers with it go on.
[[nodiscard]] bool reports_failure(const member& m) noexcept;

/// Whether the cluster takes that life for dead: it is down, and not by its own report.
[[nodiscard]] bool is_lost(const member& m) noexcept;
/// Whether the name is of an open stage, or would be: no file gives such a one.
[[nodiscard]] bool is_open_name(std::string_view name);
/// The node of that name, or null. The pointer is into `all`.
[[nodiscard]] const member* find_member(const membership& all, std::string_view name) noexcept;

/// Of a reason that a node gives for its failure, in characters.
inline constexpr std::size_t max_failure = 200;

}  // namespace troupe::actors
