#pragma once

#include <cstddef>
#include <filesystem>
#include <iterator>

namespace troupe::testing {

/// How many descriptors this process has open, with that of the count itself.
inline std::size_t open_descriptors() {
  return static_cast<std::size_t>(
      std::distance(std::filesystem::directory_iterator{"/proc/self/fd"}, {}));
}

}  // namespace troupe::testing
