#include "troupe/transport/os_error.hpp"

#include <system_error>

namespace troupe::transport {

std::string what_errno(int number) {
  return std::system_category().message(number);
}

}  // namespace troupe::transport
