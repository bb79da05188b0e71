#include "troupe/actors/runtime/local_address.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <memory>

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include "troupe/config/automatic_host.hpp"
#include "troupe/transport/os_error.hpp"

namespace troupe::actors {

namespace {

/// The source address of packets to that address; else the `errno` that says why there is none.
result<std::string> source_towards(const addrinfo& to) {
  const int fd = ::socket(to.ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  sockaddr_storage from{};
  socklen_t length = sizeof from;
  auto* raw = reinterpret_cast<sockaddr*>(&from);
  // Connecting a datagram socket only chooses the route.
  const bool found = fd >= 0 && ::connect(fd, to.ai_addr, to.ai_addrlen) == 0 &&
                     ::getsockname(fd, raw, &length) == 0;
  const int number = errno;
  if (fd >= 0) ::close(fd);
  if (!found) return fail(errc::peer_unreachable, transport::what_errno(number));
  std::array<char, NI_MAXHOST> text{};
  const int failed =
      ::getnameinfo(raw, length, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST);
  if (failed != 0) return fail(errc::peer_unreachable, ::gai_strerror(failed));
  return std::string{text.data()};
}

}  // namespace

result<std::string> address_towards(const std::string& host, std::uint16_t port) {
  const auto refused = [&](const std::string& why) {
    return fail(errc::peer_unreachable,
                "no address of this machine leads to the supervisor's host " + host + ": " + why +
                    "; check supervisor.host and the network, or name this machine's address in "
                    "place of `auto` in the stage's hosts");
  };
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* list = nullptr;
  const auto service = std::to_string(std::max<std::uint16_t>(port, 1));
  if (const int failed = ::getaddrinfo(host.c_str(), service.c_str(), &hints, &list); failed != 0)
    return refused(::gai_strerror(failed));
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner{list, &::freeaddrinfo};
  std::string why = "it has no address";
  for (const addrinfo* a = list; a != nullptr; a = a->ai_next) {
    auto source = source_towards(*a);
    if (source) return source;
    why = source.error().message;
  }
  return refused(why);
}

result<std::string> address_of(const std::string& host,
                               const config::supervisor_config& supervisor) {
  if (!config::is_automatic(host)) return host;
  return address_towards(supervisor.host, supervisor.port);
}

}  // namespace troupe::actors
