#pragma once

#include <cstdint>
#include <vector>

#include <netinet/in.h>
#include <sys/socket.h>

/// The connections of this process.
namespace troupe::testing {

/// The descriptors of the connections to a port.
inline std::vector<int> connections_towards(std::uint16_t port) {
  std::vector<int> found;
  for (int fd = 0; fd < 1024; ++fd) {
    sockaddr_in there{};
    socklen_t size = sizeof there;
    if (::getpeername(fd, reinterpret_cast<sockaddr*>(&there), &size) == 0 &&
        there.sin_family == AF_INET && ntohs(there.sin_port) == port) {
      found.push_back(fd);
    }
  }
  return found;
}

/// Resets the connections to a port and returns how many there were. Data not yet read is lost.
inline int reset_connections(std::uint16_t port) {
  int reset = 0;
  for (const int fd : connections_towards(port)) {
    sockaddr nobody{};
    nobody.sa_family = AF_UNSPEC;
    if (::connect(fd, &nobody, sizeof nobody) == 0) ++reset;
  }
  return reset;
}

}  // namespace troupe::testing
