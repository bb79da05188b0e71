#pragma once

#include <string>

namespace troupe::transport {

/// What the system calls an `errno`: "Permission denied".
[[nodiscard]] std::string what_errno(int number);

}  // namespace troupe::transport
