#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include <netinet/in.h>
#include <sys/socket.h>

namespace troupe::io {

/// Breaks the connections that this process has from or to one of its own ports, as a network may.
/// Returns the number of ends.
inline int break_sockets(std::uint16_t port) {
  const auto is_there = [port](int fd, auto* name_of) {
    sockaddr_in at{};
    socklen_t size = sizeof at;
    return name_of(fd, reinterpret_cast<sockaddr*>(&at), &size) == 0 && at.sin_family == AF_INET &&
           ntohs(at.sin_port) == port;
  };
  const auto is_connected = [](int fd) {
    sockaddr_in at{};
    socklen_t size = sizeof at;
    return ::getpeername(fd, reinterpret_cast<sockaddr*>(&at), &size) == 0;
  };
  int broken = 0;
  for (const auto& one : std::filesystem::directory_iterator{"/proc/self/fd"}) {
    const int fd = std::stoi(one.path().filename().string());
    if (!is_connected(fd)) continue;  // listening sockets stay
    if (!is_there(fd, &::getsockname) && !is_there(fd, &::getpeername)) continue;
    ::shutdown(fd, SHUT_RDWR);
    ++broken;
  }
  return broken;
}

}  // namespace troupe::io
