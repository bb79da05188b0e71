#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "troupe/kvcache/byte_set.hpp"
#include "troupe/kvcache/ids.hpp"
#include "troupe/kvcache/result.hpp"

namespace troupe::transport {

/// How bytes travel. Numbers are part of the wire protocol.
enum class backend_kind : std::uint8_t { shm = 1, tcp = 2, rdma = 3, xgmi = 4 };
enum class memory_kind : std::uint8_t { host = 1, device = 2 };
/// What a grant permits the peer to do with our memory.
enum class access : std::uint8_t { read = 1, write = 2, read_write = 3 };
/// Seen from the initiator: `write` moves local to remote, `read` remote to local.
enum class direction : std::uint8_t { write = 1, read = 2 };

[[nodiscard]] std::string_view to_string(backend_kind kind) noexcept;
[[nodiscard]] std::optional<backend_kind> backend_kind_from(std::string_view name) noexcept;
/// From the number used on the wire.
[[nodiscard]] std::optional<backend_kind> backend_kind_from(std::uint8_t number) noexcept;
[[nodiscard]] constexpr bool permits(access granted, access wanted) noexcept {
  return (static_cast<std::uint8_t>(granted) & static_cast<std::uint8_t>(wanted)) ==
         static_cast<std::uint8_t>(wanted);
}

/// Memory that its driver exported as a dma-buf (Linux, Documentation/driver-api/dma-buf.rst). A NIC
/// can register such memory, GPU memory for instance, without this process mapping it.
struct exported_memory {
  int dmabuf{-1};           ///< owned by the caller, who may close it after registering
  std::uint64_t offset{0};  ///< bytes, of the memory's first byte in the dma-buf
  /// `host`: the CPU can access the bytes at their address as well. `device`: only devices can;
  /// `shm` and `tcp` then refuse the region unless it belongs to a GPU of this process.
  memory_kind kind{memory_kind::device};
};

/// The handle with which another process exports an event: the bytes of a `cudaIpcEventHandle_t` or
/// a `hipIpcEventHandle_t`.
using event_handle = std::array<std::byte, 64>;

/// A point in the work of a GPU that an engine computes on: an event (a `cudaEvent_t` or a
/// `hipEvent_t`) recorded behind the work that it marks.
struct compute_point {
  void* event{nullptr};  ///< of this process
  std::uint32_t gpu{0};  ///< of the event, as `cudaGetDevice` counts in this process
  /// Used instead of `event`: an event of another process of this host, for engines whose workers
  /// compute in their own processes. The worker records the event before it passes the handle, and
  /// records it again only after the call that took the handle has returned. The event stays open
  /// here for reuse, so the worker must keep it for as long as it works.
  std::optional<event_handle> shared{};
};

/// A stream on which an engine launches work (a `cudaStream_t` or a `hipStream_t`).
struct compute_stream {
  void* handle{nullptr};  ///< null: the GPU's default stream
  std::uint32_t gpu{0};   ///< of the stream, as `cudaGetDevice` counts in this process
};

/// Where a process runs: the facts from which backends prove that memory can be shared. Two
/// processes are on one host if their `boot_id` is equal; `why_apart` checks the other conditions.
/// A namespace is 0 where the kernel does not show it, and 0 equals no other namespace.
struct host_identity {
  std::string boot_id;
  std::uint64_t network_namespace{0};  ///< of abstract unix sockets
  std::uint64_t pid_namespace{0};      ///< of `pid`
  std::uint64_t user_namespace{0};     ///< of `uid`
  std::uint32_t pid{0};
  std::uint32_t uid{0};
  /// PCI bus ids ("0000:1b:00.0") of the GPUs that the process sees; filled in by the endpoint.
  std::vector<std::string> gpus{};

  /// Leaves `gpus` empty, since finding them takes a driver.
  [[nodiscard]] static host_identity of_this_process();
  friend bool operator==(const host_identity&, const host_identity&) = default;
};

/// Whether links of this backend join processes of one host only, because they share memory.
[[nodiscard]] bool joins_one_host_only(backend_kind kind) noexcept;
/// Why two processes cannot share memory over any backend: they are on different hosts, in
/// different namespaces, or run as different users. Empty if they can.
[[nodiscard]] std::optional<std::string> why_apart(const host_identity& self,
                                                   const host_identity& peer);

/// Which batches may use a grant, and what ends the grant at its owner.
struct grant_scope {
  transfer_id transfer;  ///< whose fence ends the grant
  /// Batches of any transfer may use the grant. `transfer` is then an id of the grant alone, which
  /// no batch carries.
  bool standing{false};

  /// For the batches of one transfer.
  // NOLINTNEXTLINE(google-explicit-constructor): most grants are for a transfer
  constexpr grant_scope(transfer_id of) noexcept : transfer{of} {}
  /// For all batches of the link, until `link::revoke`. Draws a transfer id for the grant itself.
  [[nodiscard]] static grant_scope for_all_transfers();

 private:
  constexpr grant_scope(transfer_id own, bool stands) noexcept : transfer{own}, standing{stands} {}
};

/// A peer's permission to read or write parts of one of our regions, in the form that is sent to
/// the peer. The message may leave out `permitted` if the peer can derive it from the other fields.
/// Made by `link::grant` at the owner and valid on that link only, until the owner fences the
/// transfer, or revokes the grant if it is a standing one. Offsets in segments that use the grant
/// are bytes from the start of the region.
struct remote_grant {
  std::uint64_t id{0};   ///< unguessable, never reused
  region_id region;      ///< of the owner
  incarnation owner;     ///< the life of the node that the grant belongs to
  transfer_id transfer;  ///< the transfer it was given for
  bool standing{false};  ///< `grant_scope::standing`
  access rights{access::read};
  std::uint64_t region_size{0};  ///< bytes

  /// Whether a batch of transfer `of` may use it.
  [[nodiscard]] bool serves(transfer_id of) const noexcept { return standing || transfer == of; }
  byte_set permitted;          ///< the parts of the region that may be touched
  std::vector<std::byte> key;  ///< the backend's own (a slot, an rkey); at most `max_key_size`

  static constexpr std::size_t max_key_size = 64;
  static constexpr std::size_t max_extents = 65'536;  ///< of `permitted` in a message
  friend bool operator==(const remote_grant&, const remote_grant&) = default;
};

/// How to reach one side of a link that is being established. Sent in a cluster message; opaque
/// outside its backend. At most `max_payload` bytes.
struct link_offer {
  backend_kind kind{backend_kind::tcp};
  incarnation owner;
  std::vector<std::byte> payload;

  static constexpr std::size_t max_payload = 4096;
};

}  // namespace troupe::transport
