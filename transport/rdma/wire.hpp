#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "troupe/kvcache/result.hpp"
#include "troupe/transport/rdma/memory_keys.hpp"
#include "troupe/transport/types.hpp"

/// The protocol between the two ends of an `rdma` link, besides the bytes that they move. All
/// numbers are little-endian, laid out as the structures in memory.
///
/// An offer (in an actor message) names the queue pairs: one for messages, and `lanes` for bytes. A
/// message is a SEND of a `message_header` and its payload; a longer payload is sent in parts, all
/// but the last with `flag_more`. The receiver returns a credit for each buffer that it posts
/// again. A sender reserves one credit for a message that only returns credits, so two full queues
/// cannot wait for each other.
///
/// A write with a notice is sent as writes, the last on each lane with immediate data (the batch's
/// number), and a `notice` with the same number and the number of lanes used. The target delivers
/// the notice's frame once that many immediates and the notice have arrived: everything before an
/// immediate on its lane has then landed (InfiniBand Architecture, 9.5 and 9.6: ordering within a
/// reliable connection).
///
/// A write of few bytes with a notice is one `small` message (small_batch.hpp). Every message
/// carries the number of small batches handled so far. A small batch that the target does not carry
/// out is answered by `refused`, which no answer to a later one overtakes.
///
/// No NIC accesses memory before the owner has sent `keys`: a grant travels outside the link and
/// only names itself; the keys are sent, before or after the grant arrives, as soon as the owner's
/// NIC has opened the memory. `revoke` takes back all keys of a transfer: the initiator stops,
/// waits for its requests in flight, and sends `revoked`. An owner with memory windows does not
/// depend on that answer.
namespace troupe::transport::rdma {

inline constexpr std::size_t max_lanes = 64;
inline constexpr std::size_t token_size = 16;
using token = std::array<std::byte, token_size>;

struct rail_offer {
  std::array<std::uint8_t, 16> gid{};
  std::uint16_t lid{0};      ///< InfiniBand only
  std::uint8_t mtu{0};       ///< of `ibv_mtu`
  std::uint8_t ethernet{0};  ///< 1 for RoCE
  std::uint32_t unused{0};
};

struct queue_pair_offer {
  std::uint32_t number{0};
  std::uint32_t first_packet{0};  ///< 24 bits
  std::uint8_t rail{0};
  std::array<std::uint8_t, 7> unused{};
};

struct offer_body {
  token secret{};                    ///< the peer shows it to prove that it has this offer
  std::uint64_t link{0};             ///< this end's number, named in its grants
  std::uint32_t message_buffers{0};  ///< the peer's initial credits
  std::uint32_t buffer_bytes{0};     ///< the most in one message, header included
  std::uint32_t notices{0};          ///< immediates that may be in flight on one lane
  std::uint8_t outstanding_reads{0};
  std::uint8_t rails{0};
  std::uint8_t lanes{0};
  std::uint8_t unused{0};
  queue_pair_offer messages;
  std::array<rail_offer, max_rails> rail{};
  std::array<queue_pair_offer, max_lanes> lane{};

  [[nodiscard]] std::vector<std::byte> encode() const;
  /// `invalid_config`: not an offer of this version, or impossible numbers.
  [[nodiscard]] static result<offer_body> decode(std::span<const std::byte> bytes);
};

/// The `remote_grant::key`: names a grant of a link. The keys that open the memory travel over the
/// link, in `grant_keys`.
struct grant_key {
  std::uint64_t link{0};   ///< the end that gave the grant
  std::uint64_t grant{0};  ///< number of the grant
  std::uint64_t host{0};   ///< 1 if the owner's processor reaches the memory (small batches)

  [[nodiscard]] std::vector<std::byte> encode() const;
  [[nodiscard]] static result<grant_key> decode(std::span<const std::byte> bytes);
};

/// Payload of `keys`, which the target sends as soon as its NIC has opened the memory of a grant.
/// It may arrive before or after the grant, which travels outside the link. Batches, except small
/// ones, wait for it. Valid until `revoke`.
struct grant_keys {
  std::uint64_t grant{0};
  transfer_id transfer;
  std::uint64_t address{0};      ///< of the region's first byte in its owner's process
  std::uint64_t begin{0};        ///< offset of the first open byte of the region, ...
  std::uint64_t end{0};          ///< ... and past the last; all extents lie between
  std::uint64_t piece_bytes{1};  ///< size of the pieces that the region is registered in
  access rights{access::read};
  std::uint16_t lanes{0};
  /// One per lane and piece from `begin` to `end`; the keys of a piece are adjacent.
  std::vector<std::uint32_t> keys;

  static constexpr std::size_t max_keys = 65'536;

  /// The number of pieces from `begin` to `end`.
  [[nodiscard]] std::uint64_t pieces() const noexcept {
    return end == begin ? 0 : (end - 1) / piece_bytes - begin / piece_bytes + 1;
  }
  /// Whether all open bytes are in one piece.
  [[nodiscard]] bool in_one() const noexcept { return keys.size() == lanes; }
  /// The key for the byte at `offset` of the region, which must be open.
  [[nodiscard]] std::uint32_t key_at(std::uint64_t offset, std::size_t lane) const noexcept {
    if (in_one()) return keys[lane];
    return keys[(offset / piece_bytes - begin / piece_bytes) * lanes + lane];
  }
  [[nodiscard]] std::vector<std::byte> encode() const;
  /// `unauthorized`: impossible numbers.
  [[nodiscard]] static result<grant_keys> decode(std::span<const std::byte> bytes);
};

enum class message_kind : std::uint8_t {
  hello = 1,  ///< payload: the receiver's token. The dialer sends first, the acceptor answers
  frame,      ///< a session frame
  notice,     ///< the frame of batch `sequence`, which went over `parts` lanes
  revoke,     ///< payload: transfer. The receiver stops using its grants, then sends `revoked`
  revoked,    ///< payload: transfer
  credit,     ///< nothing but the header
  bye,        ///< the link ends here
  keys,       ///< payload: `grant_keys`
  small,      ///< payload: a `small_batch`, its frame included
  refused,    ///< of the last of the peer's small batches counted in `landed`; payload: why
};

inline constexpr std::uint8_t flag_more = 1;

struct message_header {
  std::uint8_t kind{0};
  std::uint8_t flags{0};
  std::uint16_t bytes{0};     ///< payload bytes in this part
  std::uint16_t parts{0};     ///< notice: lanes
  std::uint16_t credits{0};   ///< buffers posted again since the last message
  std::uint32_t sequence{0};  ///< notice: the batch
  std::uint32_t taken{0};     ///< the peer's notices delivered so far, modulo 2^32
  std::uint32_t landed{0};    ///< the peer's small batches landed or refused so far, modulo 2^32
};
static_assert(sizeof(message_header) == 20);

}  // namespace troupe::transport::rdma
