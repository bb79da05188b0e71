#pragma once

#include <cstdint>
#include <string>

#include "troupe/kvcache/result.hpp"
#include "troupe/transport/tcp/socket.hpp"

namespace troupe::actors {

using transport::owned_fd;
using transport::tcp::socket_address;

/// All sockets here are non-blocking and close-on-exec.

/// Bound and listening; an empty host: on all interfaces. Waits for the resolver where `host` is a
/// name. `already_exists` where the port is taken, else `invalid_config`.
[[nodiscard]] result<owned_fd> listen_at(const std::string& host, std::uint16_t port);
/// Begins to connect. `peer_unreachable`, `overloaded` (no descriptors).
[[nodiscard]] result<owned_fd> begin_connect(const socket_address& to);
/// How a connect ended that was begun; 0 or an errno. A socket that the kernel connected with itself
/// (it may, where nothing listens at a port of its own choice) counts as refused.
[[nodiscard]] int connect_outcome(int fd) noexcept;
/// 127.0.0.0/8 (also as IPv6 writes it) or ::1: nobody on another machine can be there.
[[nodiscard]] bool is_loopback(const socket_address& address) noexcept;
/// Where a socket is bound.
[[nodiscard]] socket_address address_of_socket(int fd) noexcept;
/// What waits goes out at once, small as it is.
void send_at_once(int fd) noexcept;
/// Who is at the other end; of size 0 where nobody is any more.
[[nodiscard]] socket_address peer_of_socket(int fd) noexcept;
/// "10.0.0.2:34567", "[::1]:34567": who is at the other end.
[[nodiscard]] std::string peer_text(int fd);
/// An address without its port, as bytes to compare; one of IPv4 is the same however it is written.
[[nodiscard]] std::string address_bytes(const socket_address& address);
/// What one host can have many addresses of, as bytes to compare: the whole of an IPv4 address, and the
/// first 64 bits of an IPv6 one.
[[nodiscard]] std::string network_of(const socket_address& address);
/// What to tell whoever listens at a name that is bound to a loopback address and does not say so; empty
/// where nothing is: other addresses, numbers, `localhost`.
[[nodiscard]] std::string loopback_notice(const std::string& name, const socket_address& bound);
/// "HOST:PORT", for sentences.
[[nodiscard]] std::string socket_text(const std::string& host, std::uint16_t port);

}  // namespace troupe::actors
