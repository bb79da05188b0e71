#include "sockets.hpp"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include "processes.hpp"

namespace troupe::bench {

std::pair<int, int> connected_sockets() {
  const int door = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof at;
  if (::bind(door, reinterpret_cast<sockaddr*>(&at), size) != 0 || ::listen(door, 1) != 0) {
    die("bind");
  }
  ::getsockname(door, reinterpret_cast<sockaddr*>(&at), &size);
  const int a = ::socket(AF_INET, SOCK_STREAM, 0);
  if (::connect(a, reinterpret_cast<sockaddr*>(&at), size) != 0) die("connect");
  const int b = ::accept(door, nullptr, nullptr);
  const int on = 1;
  for (const int fd : {a, b}) ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  ::close(door);
  return {a, b};
}

}  // namespace troupe::bench
