#include "troupe/actors/door/door_sockets.hpp"

#include <array>
#include <cerrno>
#include <cstring>

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include "troupe/actors/base/phrases.hpp"
#include "troupe/actors/door/door_resolver.hpp"
#include "troupe/transport/os_error.hpp"

namespace troupe::actors {

namespace {

const sockaddr* generic(const socket_address& address) {
  return reinterpret_cast<const sockaddr*>(&address.storage);
}

owned_fd stream_socket(const socket_address& address) {
  return owned_fd{
      ::socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)};
}

/// Returns 0 or an errno.
int listen_on(const owned_fd& fd, const socket_address& address) {
  if (!fd) return errno;
  const int on = 1;
  ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (::bind(fd.get(), generic(address), address.size) != 0) return errno;
  return ::listen(fd.get(), SOMAXCONN) == 0 ? 0 : errno;
}

/// Returns an address of size 0 if the call fails.
template <class Ask>
socket_address told_by(Ask ask, int fd) noexcept {
  socket_address address;
  socklen_t size = sizeof address.storage;
  if (ask(fd, reinterpret_cast<sockaddr*>(&address.storage), &size) != 0) return {};
  address.size = size;
  return address;
}

}  // namespace

result<owned_fd> listen_at(const std::string& host, std::uint16_t port) {
  const auto where = "cannot listen at " + socket_text(host, port) + ": ";
  const auto all = addresses_of(host, port);
  if (!all) return fail(errc::invalid_config, where + all.error().message);
  int why = EADDRNOTAVAIL;
  for (const auto& address : *all) {
    auto fd = stream_socket(address);
    why = listen_on(fd, address);
    if (why == 0) return fd;
    if (why == EADDRINUSE) break;  // do not listen at only some of the addresses
  }
  if (why == EADDRINUSE) {
    return fail(errc::already_exists,
                where + transport::what_errno(why) + "; choose another port, or 0 for any");
  }
  const auto* advice = why == EADDRNOTAVAIL ? "; it is not an address of this machine"
                       : why == EACCES      ? "; choose a port above 1023"
                                            : "";
  return fail(errc::invalid_config, where + transport::what_errno(why) + advice);
}

result<owned_fd> begin_connect(const socket_address& to) {
  auto fd = stream_socket(to);
  if (!fd) {
    return fail(errc::overloaded, "no socket: " + transport::what_errno(errno) +
                                      "; allow the process more descriptors (ulimit -n)");
  }
  send_at_once(fd.get());
  if (::connect(fd.get(), generic(to), to.size) != 0 && errno != EINPROGRESS && errno != EINTR)
    return fail(errc::peer_unreachable, transport::what_errno(errno));
  return fd;
}

int connect_outcome(int fd) noexcept {
  int why = 0;
  socklen_t size = sizeof why;
  if (::getsockopt(fd, SOL_SOCKET, SO_ERROR, &why, &size) != 0) return errno;
  if (why != 0) return why;
  sockaddr_storage here{};
  sockaddr_storage there{};
  socklen_t here_size = sizeof here;
  socklen_t there_size = sizeof there;
  if (::getpeername(fd, reinterpret_cast<sockaddr*>(&there), &there_size) != 0) return errno;
  ::getsockname(fd, reinterpret_cast<sockaddr*>(&here), &here_size);
  const bool itself = here_size == there_size && std::memcmp(&here, &there, here_size) == 0;
  return itself ? ECONNREFUSED : 0;
}

bool is_loopback(const socket_address& address) noexcept {
  if (address.storage.ss_family == AF_INET) {
    sockaddr_in v4{};
    std::memcpy(&v4, &address.storage, sizeof v4);
    return (ntohl(v4.sin_addr.s_addr) >> 24u) == 127;
  }
  if (address.storage.ss_family != AF_INET6) return false;
  sockaddr_in6 v6{};
  std::memcpy(&v6, &address.storage, sizeof v6);
  if (IN6_IS_ADDR_V4MAPPED(&v6.sin6_addr)) return v6.sin6_addr.s6_addr[12] == 127;
  return IN6_IS_ADDR_LOOPBACK(&v6.sin6_addr);
}

std::string address_bytes(const socket_address& address) {
  const auto bytes = [](const auto& from, std::size_t offset, std::size_t size) {
    return std::string{reinterpret_cast<const char*>(&from) + offset, size};
  };
  if (address.storage.ss_family == AF_INET) {
    sockaddr_in v4{};
    std::memcpy(&v4, &address.storage, sizeof v4);
    return bytes(v4.sin_addr, 0, 4);
  }
  if (address.storage.ss_family != AF_INET6) return {};
  sockaddr_in6 v6{};
  std::memcpy(&v6, &address.storage, sizeof v6);
  return IN6_IS_ADDR_V4MAPPED(&v6.sin6_addr) ? bytes(v6.sin6_addr, 12, 4)
                                             : bytes(v6.sin6_addr, 0, 16);
}

std::string network_of(const socket_address& address) {
  return address_bytes(address).substr(0, 8);
}

std::string loopback_notice(const std::string& name, const socket_address& bound) {
  if (name.empty() || !is_loopback(bound) || addresses_of_number(name, 0)) return {};
  std::string first_label;
  for (const char c : name.substr(0, name.find('.')))
    first_label += static_cast<char>(c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c);
  if (first_label == "localhost" || first_label == "ip6-localhost") return {};
  return "`" + name +
         "` is a loopback address on this machine (see /etc/hosts), so no other machine reaches "
         "this port; mend /etc/hosts or write the address";
}

socket_address address_of_socket(int fd) noexcept {
  return told_by(::getsockname, fd);
}

void send_at_once(int fd) noexcept {
  const int on = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

socket_address peer_of_socket(int fd) noexcept {
  return told_by(::getpeername, fd);
}

std::string peer_text(int fd) {
  const auto there = peer_of_socket(fd);
  std::array<char, NI_MAXHOST> host{};
  std::array<char, NI_MAXSERV> port{};
  if (there.size == 0 ||
      ::getnameinfo(generic(there), there.size, host.data(), host.size(), port.data(), port.size(),
                    NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
    return "somebody who is gone";
  }
  std::string text;
  const bool v6 = there.storage.ss_family == AF_INET6;
  if (v6) text += '[';
  text += host.data();
  text += v6 ? "]:" : ":";
  text += port.data();
  return text;
}

std::string socket_text(const std::string& host, std::uint16_t port) {
  return host_text(host.empty() ? "*" : host) + ":" + std::to_string(port);
}

}  // namespace troupe::actors
