#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "troupe/config/name_rule.hpp"

namespace troupe::config {

/// Of a replica that joins an open stage: the engine's own id.
inline constexpr name_rule open_replica_name{64};

/// What the name of a node of an open stage says: `STAGE.REPLICA.RANK`. No name of a file has a dot,
/// so nobody who joins has a name that a file gives.
struct open_place {
  std::string stage;
  std::string replica;
  std::uint32_t rank{0};

  friend bool operator==(const open_place&, const open_place&) = default;
};

[[nodiscard]] std::string open_node_name(const open_place& place);
/// Empty: no such name. Whether the stage is there, and open, is for the caller to see.
[[nodiscard]] std::optional<open_place> open_place_of(std::string_view name);

}  // namespace troupe::config
