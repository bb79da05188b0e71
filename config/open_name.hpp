#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "troupe/config/name_rule.hpp"

namespace troupe::config {

/// The rule for the engine's own id of a replica that joins an open stage.
inline constexpr name_rule open_replica_name{64};

/// The parts of the name of a node of an open stage: `STAGE.REPLICA.RANK`. Names in a file have no
/// dot, so a joining node never has a name from a file.
struct open_place {
  std::string stage;
  std::string replica;
  std::uint32_t rank{0};

  friend bool operator==(const open_place&, const open_place&) = default;
};

[[nodiscard]] std::string open_node_name(const open_place& place);
/// Empty if the name has another form. The caller checks whether the stage exists and is open.
[[nodiscard]] std::optional<open_place> open_place_of(std::string_view name);

}  // namespace troupe::config
