#include "troupe/transport/shm/wire.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <type_traits>

#include <sys/socket.h>
#include <sys/un.h>

#include "troupe/transport/os_error.hpp"

namespace troupe::transport::shm {

namespace {

constexpr std::size_t max_fds = 3;
constexpr std::size_t max_message = 256;

struct message_header {
  std::uint32_t magic{wire_magic};
  std::uint16_t version{wire_version};
  std::uint16_t kind{0};  ///< index of the alternative in `message`, from 1
};

template <std::size_t I = 0>
std::optional<message> parse_body(std::size_t kind, std::span<const std::byte> body) {
  if constexpr (I == std::variant_size_v<message>) {
    return std::nullopt;
  } else {
    using body_type = std::variant_alternative_t<I, message>;
    static_assert(std::is_trivially_copyable_v<body_type>);
    if (kind != I + 1) return parse_body<I + 1>(kind, body);
    if (body.size() != sizeof(body_type)) return std::nullopt;
    body_type value{};
    std::memcpy(&value, body.data(), sizeof value);
    return message{value};
  }
}

struct unix_address {
  sockaddr_un address{};
  socklen_t length{0};
};

unix_address abstract_address(const std::string& name) {
  unix_address made;
  made.address.sun_family = AF_UNIX;
  const std::size_t bytes = std::min(name.size(), sizeof made.address.sun_path - 1);
  std::memcpy(made.address.sun_path + 1, name.data(), bytes);
  made.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + bytes);
  return made;
}

struct offer_payload {
  std::uint32_t magic{wire_magic};
  std::uint16_t version{wire_version};
  std::uint16_t unused{0};
  shm_offer body;
};
static_assert(std::is_trivially_copyable_v<offer_payload>);

}  // namespace

std::vector<std::byte> shm_offer::encode() const {
  offer_payload payload;
  payload.body = *this;
  std::vector<std::byte> bytes(sizeof payload);
  std::memcpy(bytes.data(), &payload, sizeof payload);
  return bytes;
}

result<shm_offer> shm_offer::decode(std::span<const std::byte> bytes) {
  offer_payload payload;
  if (bytes.size() != sizeof payload) {
    return fail(errc::invalid_config, "shm offer: found " + std::to_string(bytes.size()) +
                                          " bytes, expected " + std::to_string(sizeof payload));
  }
  std::memcpy(&payload, bytes.data(), sizeof payload);
  if (payload.magic != wire_magic || payload.version != wire_version) {
    return fail(errc::invalid_config,
                "shm offer: found version " + std::to_string(payload.version) + ", expected " +
                    std::to_string(wire_version) + "; run the same Troupe on both sides");
  }
  const auto& address = payload.body.address;
  if (address.front() == '\0' || address.back() != '\0') {
    return fail(errc::invalid_config, "shm offer: its socket name is empty or has no end");
  }
  return payload.body;
}

result<void> send_message(int socket, const message& what, std::span<const int> fds) {
  std::array<std::byte, max_message> bytes{};
  message_header header;
  header.kind = static_cast<std::uint16_t>(what.index() + 1);
  std::memcpy(bytes.data(), &header, sizeof header);
  const std::size_t size = std::visit(
      [&](const auto& body) {
        static_assert(sizeof(message_header) + sizeof body <= max_message);
        std::memcpy(bytes.data() + sizeof header, &body, sizeof body);
        return sizeof header + sizeof body;
      },
      what);

  iovec part{bytes.data(), size};
  msghdr packet{};
  packet.msg_iov = &part;
  packet.msg_iovlen = 1;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int) * max_fds)> control{};
  if (!fds.empty()) {
    packet.msg_control = control.data();
    packet.msg_controllen = CMSG_SPACE(fds.size_bytes());
    cmsghdr* rights = CMSG_FIRSTHDR(&packet);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(fds.size_bytes());
    std::memcpy(CMSG_DATA(rights), fds.data(), fds.size_bytes());
  }
  while (::sendmsg(socket, &packet, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
    if (errno == EINTR) continue;
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == ETOOMANYREFS) {
      return fail(errc::overloaded, "the shm peer does not read its control socket");
    }
    return fail(errc::peer_lost, "shm control socket: sendmsg: " + what_errno(errno));
  }
  return {};
}

result<std::variant<received, socket_state>> receive_message(int socket, fds_allowed allowed) {
  std::array<std::byte, max_message> bytes{};
  iovec part{bytes.data(), bytes.size()};
  msghdr packet{};
  packet.msg_iov = &part;
  packet.msg_iovlen = 1;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int) * max_fds)> control{};
  if (allowed == fds_allowed::yes) {
    packet.msg_control = control.data();
    packet.msg_controllen = control.size();
  }
  ssize_t got = 0;
  do {
    got = ::recvmsg(socket, &packet, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  } while (got < 0 && errno == EINTR);
  using answer = std::variant<received, socket_state>;
  if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
    return answer{socket_state::would_block};
  if (got <= 0) return answer{socket_state::closed};

  received message_in;
  if (allowed == fds_allowed::yes) {
    for (cmsghdr* at = CMSG_FIRSTHDR(&packet); at != nullptr; at = CMSG_NXTHDR(&packet, at)) {
      if (at->cmsg_level != SOL_SOCKET || at->cmsg_type != SCM_RIGHTS) continue;
      const std::size_t count = (at->cmsg_len - CMSG_LEN(0)) / sizeof(int);
      for (std::size_t i = 0; i < count; ++i) {
        int fd = -1;
        std::memcpy(&fd, CMSG_DATA(at) + i * sizeof fd, sizeof fd);
        message_in.fds.emplace_back(fd);
      }
    }
  }
  if (allowed == fds_allowed::yes && (packet.msg_flags & MSG_CTRUNC) != 0) {
    return fail(
        errc::overloaded,
        "shm control socket: this process had no room for the descriptors that came; raise its "
        "limit of open files");
  }
  message_header header;
  const auto size = static_cast<std::size_t>(got);
  if (size < sizeof header || (packet.msg_flags & MSG_TRUNC) != 0) {
    return fail(errc::unauthorized, "shm control socket: a packet of " + std::to_string(size) +
                                        " bytes is not a message");
  }
  std::memcpy(&header, bytes.data(), sizeof header);
  if (header.magic != wire_magic || header.version != wire_version) {
    return fail(errc::unauthorized, "shm control socket: wrong magic or version");
  }
  auto body =
      parse_body(header.kind, std::span{bytes}.subspan(sizeof header, size - sizeof header));
  if (!body) {
    return fail(errc::unauthorized, "shm control socket: message kind " +
                                        std::to_string(header.kind) + " with " +
                                        std::to_string(size) + " bytes is not known");
  }
  message_in.body = *body;
  return answer{std::move(message_in)};
}

result<peer_credentials> credentials_of(int socket) {
  ucred found{};
  socklen_t length = sizeof found;
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &found, &length) != 0) {
    return fail(errc::unauthorized, "SO_PEERCRED: " + what_errno(errno));
  }
  return peer_credentials{static_cast<std::uint32_t>(found.pid), found.uid};
}

result<owned_fd> listen_at(const std::string& name) {
  owned_fd fd{::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)};
  const auto at = abstract_address(name);
  if (!fd || ::bind(fd.get(), reinterpret_cast<const sockaddr*>(&at.address), at.length) != 0 ||
      ::listen(fd.get(), 128) != 0) {
    return fail(errc::backend_unavailable, "abstract unix socket: " + what_errno(errno));
  }
  return fd;
}

result<owned_fd> connect_to(const std::string& name) {
  owned_fd fd{::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)};
  if (!fd) return fail(errc::overloaded, "socket: " + what_errno(errno));
  const auto at = abstract_address(name);
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&at.address), at.length) == 0)
    return fd;
  if (errno == EAGAIN || errno == EINTR) {
    return fail(errc::overloaded, "the peer's queue of connections is full");
  }
  return fail(errc::peer_unreachable, "cannot connect to the peer's unix socket: " +
                                          what_errno(errno) + "; has the process ended?");
}

}  // namespace troupe::transport::shm
