#pragma once

#include <cstddef>

#include "troupe/kvcache/result.hpp"

namespace troupe::actors {

/// Resources that a process must still be able to get. CAF and the C++ library end the process if
/// they lack one of these while they start, and this cannot be turned off.
struct room_to_start {
  std::size_t descriptors{0};
  std::size_t threads{0};
  std::size_t address_space{0};  ///< bytes
};

inline constexpr room_to_start room_of_a_node{64, 16, std::size_t{256} << 20};
inline constexpr room_to_start room_of_a_client{32, 8, std::size_t{128} << 20};

/// Takes all of it for a moment. `overloaded`, naming the limit that is in the way, how much was
/// available and how to raise it.
[[nodiscard]] result<void> check_room(const room_to_start& wanted);

}  // namespace troupe::actors
