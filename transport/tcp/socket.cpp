#include "troupe/transport/tcp/socket.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>

#include "troupe/transport/os_error.hpp"

namespace troupe::transport::tcp {

namespace {

/// Sets `code` to what getaddrinfo returned.
std::optional<socket_address> look_up(const std::string& host, std::uint16_t port, int flags,
                                      int& code) {
  addrinfo hints{};
  hints.ai_flags = flags | AI_NUMERICSERV;
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  code = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (code != 0) return std::nullopt;
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owned{found, &::freeaddrinfo};
  socket_address address;
  std::memcpy(&address.storage, found->ai_addr, found->ai_addrlen);
  address.size = found->ai_addrlen;
  return address;
}

}  // namespace

result<socket_address> resolve(const std::string& host, std::uint16_t port) {
  int code = 0;
  auto address = look_up(host, port, 0, code);
  if (address) return *address;
  return fail(errc::invalid_config,
              "address '" + host + "' does not resolve: " + ::gai_strerror(code));
}

result<socket_address> offered_address(const std::string& host, std::uint16_t port) {
  int code = 0;
  auto address = look_up(host, port, AI_NUMERICHOST, code);
  if (address) return *address;
  return fail(errc::invalid_config,
              "the peer's tcp offer names '" + host + "', which is not a numeric address");
}

bool is_wildcard(const socket_address& address) noexcept {
  if (address.storage.ss_family == AF_INET) {
    sockaddr_in in{};
    std::memcpy(&in, &address.storage, sizeof in);
    return in.sin_addr.s_addr == htonl(INADDR_ANY);
  }
  if (address.storage.ss_family == AF_INET6) {
    sockaddr_in6 in{};
    std::memcpy(&in, &address.storage, sizeof in);
    return std::memcmp(&in.sin6_addr, &in6addr_any, sizeof in6addr_any) == 0;
  }
  return false;
}

result<owned_fd> listen_on(const std::string& host, std::uint16_t port) {
  const auto where = "data port " + std::to_string(port) + " at " + host;
  auto address = resolve(host, port);
  if (!address) return fail(std::move(address).error());
  if (is_wildcard(*address)) {
    return fail(errc::invalid_config, where +
                                          ": peers dial the address that is given here; name the "
                                          "one they reach, not all interfaces");
  }
  owned_fd fd{::socket(address->storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)};
  const auto refused = [&](const char* call) {
    auto advice = errno == EADDRINUSE      ? "; choose another port, or 0 for any"
                  : errno == EADDRNOTAVAIL ? "; it is not an address of this machine"
                                           : "";
    return fail(errc::invalid_config, where + ": " + call + ": " + what_errno(errno) + advice);
  };
  if (!fd) return refused("socket");
  const int on = 1;
  ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address->storage), address->size) != 0) {
    return refused("bind");
  }
  if (::listen(fd.get(), 1024) != 0) return refused("listen");
  return fd;
}

std::uint16_t bound_port(int fd) noexcept {
  sockaddr_storage bound{};
  socklen_t size = sizeof bound;
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&bound), &size) != 0) return 0;
  if (bound.ss_family == AF_INET6) {
    sockaddr_in6 in{};
    std::memcpy(&in, &bound, sizeof in);
    return ntohs(in.sin6_port);
  }
  sockaddr_in in{};
  std::memcpy(&in, &bound, sizeof in);
  return ntohs(in.sin_port);
}

std::string bound_address(int fd) {
  sockaddr_storage bound{};
  socklen_t size = sizeof bound;
  std::array<char, NI_MAXHOST> text{};
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&bound), &size) != 0 ||
      ::getnameinfo(reinterpret_cast<const sockaddr*>(&bound), size, text.data(), text.size(),
                    nullptr, 0, NI_NUMERICHOST) != 0) {
    return {};
  }
  return text.data();
}

result<owned_fd> dial(const socket_address& to, std::chrono::milliseconds silence) {
  owned_fd fd{::socket(to.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)};
  if (!fd) return fail(errc::overloaded, "cannot dial: socket: " + what_errno(errno));
  tune_lane(fd.get(), silence);
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&to.storage), to.size) != 0 &&
      errno != EINPROGRESS) {
    return fail(errc::peer_unreachable, "cannot dial: connect: " + what_errno(errno));
  }
  return fd;
}

void tune_lane(int fd, std::chrono::milliseconds silence) noexcept {
  const int on = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  ::setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  const auto seconds = static_cast<int>(std::max<std::int64_t>(silence.count() / 1000, 2));
  const int idle_s = seconds / 2;
  const int interval_s = std::max(seconds / 5, 1);
  const int probes = std::max((seconds - idle_s) / interval_s, 1);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval_s, sizeof interval_s);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
  const auto unacknowledged_ms = static_cast<unsigned>(seconds) * 1000;
  ::setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &unacknowledged_ms, sizeof unacknowledged_ms);
}

}  // namespace troupe::transport::tcp
