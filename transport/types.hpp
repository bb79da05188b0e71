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
/// Of the number that travels.
[[nodiscard]] std::optional<backend_kind> backend_kind_from(std::uint8_t number) noexcept;
[[nodiscard]] constexpr bool permits(access granted, access wanted) noexcept {
  return (static_cast<std::uint8_t>(granted) & static_cast<std::uint8_t>(wanted)) ==
         static_cast<std::uint8_t>(wanted);
}

/// Memory that its driver exported as a dma-buf (Linux, Documentation/driver-api/dma-buf.rst). A NIC
/// can register such memory without this process mapping it: memory of a GPU, say.
struct exported_memory {
  int dmabuf{-1};  ///< descriptor of the dma-buf; the caller's, who may close it after registering
  std::uint64_t offset{0};  ///< bytes, of the memory's first byte in the dma-buf
  /// `host`: the processor reaches the bytes at their address as well. `device`: only devices do;
  /// then `shm` and `tcp` refuse the region where it is of no GPU of this process.
  memory_kind kind{memory_kind::device};
};

/// What another process exports one of its events with: the bytes of a `cudaIpcEventHandle_t`, a
/// `hipIpcEventHandle_t`.
using event_handle = std::array<std::byte, 64>;

/// A point in the work of a GPU that an engine computes on: an event (a `cudaEvent_t`, a
/// `hipEvent_t`) that was recorded behind what it stands for.
struct compute_point {
  void* event{nullptr};  ///< of this process
  std::uint32_t gpu{0};  ///< of the event, as `cudaGetDevice` counts in this process
  /// Instead of `event`: one of another process of this host, for engines whose workers compute in
  /// processes of their own. The worker has recorded it before its handle comes here, and records it
  /// again only when the call that took it has returned. It stays open here for the next time, so
  /// the worker keeps it as long as it works.
  std::optional<event_handle> shared{};
};

/// A stream that an engine gives work to (a `cudaStream_t`, a `hipStream_t`).
struct compute_stream {
  void* handle{nullptr};  ///< null: the GPU's default stream
  std::uint32_t gpu{0};   ///< of the stream, as `cudaGetDevice` counts in this process
};

/// Where a process runs, as far as backends need to know to prove that memory can be shared. Two
/// processes are on one host when `boot_id` is equal; `why_apart` says what else must be. A namespace is
/// 0 where the kernel does not show it, and then equals no other.
struct host_identity {
  std::string boot_id;
  std::uint64_t network_namespace{0};  ///< of abstract unix sockets
  std::uint64_t pid_namespace{0};      ///< of `pid`
  std::uint64_t user_namespace{0};     ///< of `uid`
  std::uint32_t pid{0};
  std::uint32_t uid{0};
  /// PCI bus ids of the GPUs that the process sees, "0000:1b:00.0"; what an endpoint says of itself.
  std::vector<std::string> gpus{};

  /// Without the GPUs: to find them takes a driver.
  [[nodiscard]] static host_identity of_this_process();
  friend bool operator==(const host_identity&, const host_identity&) = default;
};

/// Whether links of this backend join processes of one host only: those that share memory.
[[nodiscard]] bool joins_one_host_only(backend_kind kind) noexcept;
/// Why two processes cannot share memory, whatever moves the bytes: they are on different hosts, in
/// different namespaces, or of different users. Empty: they can.
[[nodiscard]] std::optional<std::string> why_apart(const host_identity& self,
                                                   const host_identity& peer);

/// For whom a grant is, and what ends it at its owner.
struct grant_scope {
  transfer_id transfer;  ///< whose fence ends the grant
  /// Batches of any transfer may use the grant, and `transfer` is the grant's own: no batch has it.
  bool standing{false};

  /// For the batches of one transfer.
  // NOLINTNEXTLINE(google-explicit-constructor): most grants are for a transfer
  constexpr grant_scope(transfer_id of) noexcept : transfer{of} {}
  /// For all batches of the link, until `link::revoke`. Draws the grant's own transfer.
  [[nodiscard]] static grant_scope for_all_transfers();

 private:
  constexpr grant_scope(transfer_id own, bool stands) noexcept : transfer{own}, standing{stands} {}
};

/// A peer's permission to read or write parts of one of our regions, in the form that travels to it
/// in a message; what is permitted may be left out there, where the peer can tell it from the rest.
/// Made by `link::grant` at the owner, valid on that link only, until the owner fences the transfer,
/// or revokes the grant if it is a standing one.
/// Offsets in segments that use it are bytes from the start of the region.
struct remote_grant {
  std::uint64_t id{0};   ///< unguessable, never reused
  region_id region;      ///< of the owner
  incarnation owner;     ///< the life of the node that the grant belongs to
  transfer_id transfer;  ///< what it was given for
  bool standing{false};  ///< `grant_scope::standing`
  access rights{access::read};
  std::uint64_t region_size{0};  ///< bytes

  /// Whether a batch of `of` may use it.
  [[nodiscard]] bool serves(transfer_id of) const noexcept { return standing || transfer == of; }
  byte_set permitted;          ///< the parts of it that may be touched
  std::vector<std::byte> key;  ///< what the backend needs (a slot, an rkey); at most `max_key_size`

  static constexpr std::size_t max_key_size = 64;
  static constexpr std::size_t max_extents = 65'536;  ///< that a message lists of `permitted`
  friend bool operator==(const remote_grant&, const remote_grant&) = default;
};

/// How to reach one side of a link that is being made. Travels in a cluster message; opaque outside
/// its backend. At most `max_payload` bytes.
struct link_offer {
  backend_kind kind{backend_kind::tcp};
  incarnation owner;
  std::vector<std::byte> payload;

  static constexpr std::size_t max_payload = 4096;
};

}  // namespace troupe::transport
