#pragma once

#include <cstdint>
#include <string>

#include "troupe/actors/base/clock.hpp"
#include "troupe/actors/engine_types.hpp"

namespace troupe::actors {

/// Statistics on the bytes of a transfer, or of all transfers of one operation.
struct seen_movement {
  time_point first{}, last{};  ///< times of the first and the last byte; not set if none moved
  std::uint64_t segments{0};
  std::string backend;

  /// Adds another transfer of the operation.
  void add(const seen_movement& more);
  /// The form that the engine is told, for an operation that began and ended at these times.
  [[nodiscard]] movement told(time_point began, time_point ended) const;
};

}  // namespace troupe::actors
