#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include <sys/socket.h>

#include "troupe/kvcache/result.hpp"
#include "troupe/transport/owned_fd.hpp"

namespace troupe::transport::tcp {

struct socket_address {
  sockaddr_storage storage{};
  socklen_t size{0};
};

/// `invalid_config`: `host` is neither an address nor a name that resolves.
[[nodiscard]] result<socket_address> resolve(const std::string& host, std::uint16_t port);
/// The address of a peer's offer, without waiting: a name, which the peer may choose so that its
/// look-up takes long, is `invalid_config`.
[[nodiscard]] result<socket_address> offered_address(const std::string& host, std::uint16_t port);
/// Whether the address means "all interfaces", which no peer can dial.
[[nodiscard]] bool is_wildcard(const socket_address& address) noexcept;
/// A bound, listening, non-blocking socket. `invalid_config`: the sentence names address and port.
[[nodiscard]] result<owned_fd> listen_on(const std::string& host, std::uint16_t port);
[[nodiscard]] std::uint16_t bound_port(int fd) noexcept;
/// The numeric address; empty if there is none.
[[nodiscard]] std::string bound_address(int fd);
/// Starts a non-blocking connect of a lane (see `tune_lane`).
[[nodiscard]] result<owned_fd> dial(const socket_address& to, std::chrono::milliseconds silence);
/// Disables delays for small frames. Makes the kernel break the connection if the other host has
/// not answered for `silence` (an idle lane is probed after half of it), or has not accepted data
/// for as long.
void tune_lane(int fd, std::chrono::milliseconds silence) noexcept;
}  // namespace troupe::transport::tcp
