#pragma once

#include <cstdint>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

/// Ports of 127.0.0.1.
namespace troupe::testing {

inline sockaddr_in loopback(std::uint16_t port) {
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  at.sin_port = htons(port);
  return at;
}

/// A listening socket that accepts no connection. It lives as long as the object.
class taken_port {
 public:
  taken_port() : fd_{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)} {
    auto at = loopback(0);
    socklen_t size = sizeof at;
    auto* generic = reinterpret_cast<sockaddr*>(&at);
    if (::bind(fd_, generic, size) == 0 && ::listen(fd_, 8) == 0 &&
        ::getsockname(fd_, generic, &size) == 0)
      number_ = ntohs(at.sin_port);
  }
  ~taken_port() { ::close(fd_); }
  taken_port(const taken_port&) = delete;
  taken_port& operator=(const taken_port&) = delete;

  /// 0 if no port could be taken.
  [[nodiscard]] std::uint16_t number() const { return number_; }

 private:
  int fd_{-1};
  std::uint16_t number_{0};
};

/// A port that nobody listens on. It is outside the kernel's ephemeral range, from which another
/// process might get it before it is used. Tests that run at the same time start elsewhere.
[[nodiscard]] inline std::uint16_t free_port() {
  constexpr unsigned first = 20'000;
  constexpr unsigned count = 12'000;
  static unsigned next = static_cast<unsigned>(::getpid()) * 97;
  for (unsigned tries = 0; tries < count; ++tries) {
    const auto port = static_cast<std::uint16_t>(first + next++ % count);
    const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const auto at = loopback(port);
    const bool is_free = ::bind(fd, reinterpret_cast<const sockaddr*>(&at), sizeof at) == 0;
    ::close(fd);
    if (is_free) return port;
  }
  return taken_port{}.number();
}

}  // namespace troupe::testing
