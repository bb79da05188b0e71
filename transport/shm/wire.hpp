#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "troupe/kvcache/ids.hpp"
#include "troupe/kvcache/result.hpp"
#include "troupe/transport/owned_fd.hpp"
#include "troupe/transport/types.hpp"

/// The messages between two ends of an `shm` or `xgmi` link over their socket (abstract unix,
/// SOCK_SEQPACKET, one message per packet). The socket establishes the link and passes descriptors,
/// and its end of file says that the peer is gone; session frames and data never pass through it.
/// Both ends are on one machine: native byte order.
///
/// | message       | from     | descriptors                 | when                                |
/// | ------------- | -------- | --------------------------- | ----------------------------------- |
/// | hello         | dialer   | none                        | first, at once                      |
/// | welcome       | acceptor | control page, two doorbells | answers a valid hello               |
/// | ready         | dialer   | none                        | answers a valid welcome             |
/// | region_shared | both     | the region's memfd          | before the first grant of a region  |
/// | gpu_region_sh | both     | none                        | the same, of a GPU's memory (xgmi)  |
/// | region_gone   | both     | none                        | the region is gone: unmap it        |
/// | gpu_region_cl | both     | none                        | answers region_gone for GPU memory: |
/// |               |          |                             | it is no longer open here (xgmi)    |
/// | chunks_shared | both     | the chunks' memfd           | before the first use of one (shm)   |
/// | bye           | both     | none                        | the link ends, up or still joining  |
///
/// The doorbells of a welcome are the dialer's, then the acceptor's.
///
/// A hello proves that the dialer holds the acceptor's offer (its token), the welcome that the
/// acceptor holds the dialer's. Anything else, or anything late, closes the socket.
///
/// Both carry a probe that the receiver reads from the sender's memory. Both ends decide from the
/// outcomes whether the link comes up: if a process has engine memory, which cannot be mapped, the
/// other must be able to access it. The dialer sends ready in either case, so that the acceptor can
/// decide as well.
namespace troupe::transport::shm {

using token = std::array<std::byte, 16>;
inline constexpr std::uint16_t wire_version = 3;
inline constexpr std::uint32_t wire_magic = 0x54525031;

/// The payload of a `link_offer` of this backend.
struct shm_offer {
  token secret{};
  std::uint32_t pid{0};
  /// Name of the abstract socket, without the leading 0 byte.
  std::array<char, 48> address{};

  [[nodiscard]] std::vector<std::byte> encode() const;
  /// `invalid_config`: what is wrong.
  [[nodiscard]] static result<shm_offer> decode(std::span<const std::byte> payload);
};

/// A number at an address of the sender. A process that reads it with process_vm_readv has proved
/// that it can access the sender's memory.
struct memory_probe {
  std::uint64_t address{0};
  std::uint64_t value{0};
};

struct hello_message {
  token acceptor_token{};
  std::uint64_t dialer{0};    ///< incarnation of the sender
  std::uint64_t acceptor{0};  ///< incarnation that the sender expects
  memory_probe probe;
  std::uint32_t owns_memory{0};  ///< 1: the dialer has engine memory
  std::uint32_t unused{0};
};

struct welcome_message {
  token dialer_token{};
  std::uint64_t dialer{0};
  std::uint64_t acceptor{0};
  memory_probe probe;
  std::uint32_t reaches_dialer_memory{0};  ///< 1: process_vm_* from acceptor to dialer works
  std::uint32_t owns_memory{0};            ///< 1: the acceptor has engine memory
};

struct ready_message {
  std::uint32_t reaches_acceptor_memory{0};  ///< 1: process_vm_* from dialer to acceptor works
};

struct region_shared_message {
  std::uint32_t region{0};
  std::uint32_t unused{0};
  std::uint64_t size{0};
};

/// A region in GPU memory: its place in its allocation, and how another process opens that.
struct gpu_region_shared_message {
  std::uint32_t region{0};
  std::uint32_t unused{0};
  std::uint64_t size{0};
  std::uint64_t allocation{0};  ///< the driver's id of the allocation at its owner; never reused
  std::uint64_t allocation_size{0};  ///< bytes
  std::uint64_t offset{0};           ///< of the region's first byte in the allocation
  std::uint64_t address{0};          ///< of that byte in the owner's process; only for the owner
  std::array<char, 16> gpu{};        ///< PCI bus id, ended by 0
  std::array<std::byte, 64> handle{};
  std::uint32_t exported{0};  ///< 1: the handle can be opened by other processes
  std::uint32_t unused_too{0};
};

struct region_gone_message {
  std::uint32_t region{0};
};

/// Sent once for each region_gone of shared GPU memory.
struct gpu_region_closed_message {
  std::uint32_t region{0};
};

struct bye_message {
  std::uint32_t unused{0};
};

/// The `chunk_memory` through which the sender moves bytes from and to GPUs of the receiver.
struct chunks_shared_message {
  std::uint64_t size{0};
};

using message = std::variant<hello_message, welcome_message, ready_message, region_shared_message,
                             region_gone_message, bye_message, gpu_region_shared_message,
                             gpu_region_closed_message, chunks_shared_message>;

struct received {
  message body;
  std::vector<owned_fd> fds;
};

enum class fds_allowed : std::uint8_t { no, yes };

enum class socket_state : std::uint8_t { would_block, closed };

/// Sends one message without blocking. `overloaded`: the peer does not read; `peer_lost`: it is
/// gone.
[[nodiscard]] result<void> send_message(int socket, const message& what,
                                        std::span<const int> fds = {});

/// Receives one message without blocking. `unauthorized`: not a message of this protocol. With
/// `fds_allowed::no` the kernel discards descriptors that a stranger sends.
[[nodiscard]] result<std::variant<received, socket_state>> receive_message(int socket,
                                                                           fds_allowed allowed);

/// The process at the other end of a connected unix socket.
struct peer_credentials {
  std::uint32_t pid{0};
  std::uint32_t uid{0};
};
[[nodiscard]] result<peer_credentials> credentials_of(int socket);

/// A listening socket on an abstract name. `backend_unavailable`.
[[nodiscard]] result<owned_fd> listen_at(const std::string& name);
/// Connects without blocking. `overloaded`: the listener's queue is full, try again;
/// `peer_unreachable`.
[[nodiscard]] result<owned_fd> connect_to(const std::string& name);

}  // namespace troupe::transport::shm
