#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "troupe/actors/base/clock.hpp"
#include "troupe/actors/engine_types.hpp"

namespace troupe::actors {

/// What was seen of the bytes of a transfer, or of all transfers of one operation.
struct seen_movement {
  time_point first{}, last{};  ///< of the first byte and of the last one; none moved: not set
  std::uint64_t segments{0};
  std::string backend;

  /// One more transfer of the operation.
  void add(const seen_movement& more);
  /// For the engine, of an operation that began then and ends now.
  [[nodiscard]] movement told(time_point began, time_point ended) const;
};

}  // namespace troupe::actors
