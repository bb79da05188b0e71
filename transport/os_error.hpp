#pragma once

#include <string>
#include <system_error>

namespace troupe::transport {

/// The system's text for an `errno`: "Permission denied".
[[nodiscard]] inline std::string what_errno(int number) {
  return std::system_category().message(number);
}

}  // namespace troupe::transport
