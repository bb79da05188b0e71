#pragma once

#include <string>

namespace troupe::transport {

/// The system's text for an `errno`: "Permission denied".
[[nodiscard]] std::string what_errno(int number);

}  // namespace troupe::transport
