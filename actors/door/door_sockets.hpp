#pragma once

#include <cstdint>
#include <string>

#include "troupe/kvcache/result.hpp"
#include "troupe/transport/tcp/socket.hpp"

namespace troupe::actors {

using transport::owned_fd;
using transport::tcp::socket_address;

/// All sockets here are non-blocking and close-on-exec.

/// A bound, listening socket; an empty host means all interfaces. Waits for the resolver if `host`
/// is a name. `already_exists` if the port is taken, otherwise `invalid_config`.
[[nodiscard]] result<owned_fd> listen_at(const std::string& host, std::uint16_t port);
/// Begins to connect. `peer_unreachable`, `overloaded` (no descriptors).
[[nodiscard]] result<owned_fd> begin_connect(const socket_address& to);
/// The outcome of a finished connect: 0 or an errno. A socket that the kernel connected to itself
/// (as can happen if nothing listens at a port that the kernel also chose as source) counts as
/// refused.
[[nodiscard]] int connect_outcome(int fd) noexcept;
/// 127.0.0.0/8 (in IPv6 notation, too) or ::1: no other machine can be there.
[[nodiscard]] bool is_loopback(const socket_address& address) noexcept;
/// The address that a socket is bound to.
[[nodiscard]] socket_address address_of_socket(int fd) noexcept;
/// Disables Nagle's algorithm: small writes go out at once.
void send_at_once(int fd) noexcept;
/// The address of the other end; of size 0 if the connection is gone.
[[nodiscard]] socket_address peer_of_socket(int fd) noexcept;
/// The address of the other end as text: "10.0.0.2:34567", "[::1]:34567".
[[nodiscard]] std::string peer_text(int fd);
/// An address without its port, as bytes to compare; an IPv4 address gives the same bytes in IPv6
/// notation.
[[nodiscard]] std::string address_bytes(const socket_address& address);
/// The network of which one host can hold all addresses, as bytes to compare: a whole IPv4 address,
/// or the first 64 bits of an IPv6 address.
[[nodiscard]] std::string network_of(const socket_address& address);
/// The notice for a listener whose host name unexpectedly resolves to a loopback address. Empty for
/// other addresses, numbers, and `localhost`.
[[nodiscard]] std::string loopback_notice(const std::string& name, const socket_address& bound);
/// "HOST:PORT", for sentences.
[[nodiscard]] std::string socket_text(const std::string& host, std::uint16_t port);

}  // namespace troupe::actors
