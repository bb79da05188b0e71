#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "troupe/kvcache/result.hpp"
#include "troupe/transport/rdma/memory_keys.hpp"
#include "troupe/transport/types.hpp"

/// What the two ends of an `rdma` link say to each other, besides the bytes that they move. All
/// numbers little-endian, as the structures lie in memory.
///
/// An offer (in an actor message) names the queue pairs: one for messages, and `lanes` for bytes.
/// Messages are SENDs of one `message_header` and its payload; a longer payload goes in parts, all
/// but the last with `flag_more`. The receiver gives a credit back for each buffer that it posts
/// again; a sender keeps one credit for a message that only gives credits back, so that two full
/// queues cannot wait for each other.
///
/// A write whose target is to be told goes as writes, the last of each lane with immediate data (the
/// batch's number), and a `notice` with the same number, which says over how many lanes the batch went. The
/// target delivers the notice's frame when that many immediates and the notice are there: whatever
/// came before an immediate on its lane has landed (InfiniBand Architecture, 9.5 and 9.6: ordering
/// within a reliable connection).
///
/// A write of few bytes that the target is to be told of is one message, `small` (small_batch.hpp). Each
/// message says how many of those were answered so far; one that the target does not carry out is
/// answered by `refused`, which no answer to a later one overtakes.
///
/// No NIC touches memory before its owner has said `keys`: a grant travels some other way and names only
/// itself; the keys follow (or precede it) as soon as the owner's NIC has opened the memory. `revoke`
/// takes them back, with all of a transfer's: the initiator stops, waits for what is under way, and says
/// `revoked`. An owner with memory windows does not depend on that answer.
namespace troupe::transport::rdma {

inline constexpr std::size_t max_lanes = 64;
inline constexpr std::size_t token_size = 16;
using token = std::array<std::byte, token_size>;

struct rail_offer {
  std::array<std::uint8_t, 16> gid{};
  std::uint16_t lid{0};      ///< InfiniBand only
  std::uint8_t mtu{0};       ///< of `ibv_mtu`
  std::uint8_t ethernet{0};  ///< 1: RoCE
  std::uint32_t unused{0};
};

struct queue_pair_offer {
  std::uint32_t number{0};
  std::uint32_t first_packet{0};  ///< 24 bits
  std::uint8_t rail{0};
  std::array<std::uint8_t, 7> unused{};
};

struct offer_body {
  token secret{};                    ///< what the peer shows to prove that it has this offer
  std::uint64_t link{0};             ///< this end's number; grants of it name it
  std::uint32_t message_buffers{0};  ///< credits that the peer begins with
  std::uint32_t buffer_bytes{0};     ///< of one message with its header
  std::uint32_t notices{0};          ///< immediates that may be on their way on one lane
  std::uint8_t outstanding_reads{0};
  std::uint8_t rails{0};
  std::uint8_t lanes{0};
  std::uint8_t unused{0};
  queue_pair_offer messages;
  std::array<rail_offer, max_rails> rail{};
  std::array<queue_pair_offer, max_lanes> lane{};

  [[nodiscard]] std::vector<std::byte> encode() const;
  /// `invalid_config`: not an offer of this version, or numbers that cannot be.
  [[nodiscard]] static result<offer_body> decode(std::span<const std::byte> bytes);
};

/// The `remote_grant::key`: which grant of which link. What opens the memory the link tells the peer
/// itself, in `grant_keys`.
struct grant_key {
  std::uint64_t link{0};   ///< the end that gave it
  std::uint64_t grant{0};  ///< the grant that it belongs to
  std::uint64_t host{0};  ///< 1: the owner's processor reaches it, too: few bytes may go by message

  [[nodiscard]] std::vector<std::byte> encode() const;
  [[nodiscard]] static result<grant_key> decode(std::span<const std::byte> bytes);
};

/// What the target tells of a grant as soon as its NIC lets the peer in: the payload of `keys`. It
/// may come before or after the grant, which travels some other way; a batch waits for it, but for a
/// small one. Good until `revoke`.
struct grant_keys {
  std::uint64_t grant{0};
  transfer_id transfer;
  std::uint64_t address{0};      ///< of the region's first byte at its owner
  std::uint64_t begin{0};        ///< the first byte of the region that is open, ...
  std::uint64_t end{0};          ///< ... and the one after the last: all extents lie between
  std::uint64_t piece_bytes{1};  ///< the region is registered in pieces of so many bytes
  access rights{access::read};
  std::uint16_t lanes{0};
  /// One per lane and piece from `begin` to `end`: those of a piece together.
  std::vector<std::uint32_t> keys;

  static constexpr std::size_t max_keys = 65'536;

  /// Pieces from `begin` to `end`.
  [[nodiscard]] std::uint64_t pieces() const noexcept {
    return end == begin ? 0 : (end - 1) / piece_bytes - begin / piece_bytes + 1;
  }
  /// Whether all that is open is of one piece.
  [[nodiscard]] bool in_one() const noexcept { return keys.size() == lanes; }
  /// Of the byte at `offset` of the region, which is open.
  [[nodiscard]] std::uint32_t key_at(std::uint64_t offset, std::size_t lane) const noexcept {
    if (in_one()) return keys[lane];
    return keys[(offset / piece_bytes - begin / piece_bytes) * lanes + lane];
  }
  [[nodiscard]] std::vector<std::byte> encode() const;
  /// `unauthorized`: numbers that cannot be.
  [[nodiscard]] static result<grant_keys> decode(std::span<const std::byte> bytes);
};

enum class message_kind : std::uint8_t {
  hello = 1,  ///< payload: the receiver's token. Dialer first; the acceptor answers
  frame,      ///< a session frame
  notice,     ///< the frame of the batch `sequence`, which came over `parts` lanes
  revoke,     ///< payload: transfer. Touch nothing of ours for it any more, then say `revoked`
  revoked,    ///< payload: transfer
  credit,     ///< nothing but the header
  bye,        ///< the link ends here
  keys,       ///< payload: `grant_keys`
  small,      ///< payload: a `small_batch`, its frame included
  refused,    ///< of the peer's small batch that `landed` counts last; payload: why
};

inline constexpr std::uint8_t flag_more = 1;

struct message_header {
  std::uint8_t kind{0};
  std::uint8_t flags{0};
  std::uint16_t bytes{0};     ///< of payload in this part
  std::uint16_t parts{0};     ///< notice: lanes
  std::uint16_t credits{0};   ///< buffers posted again since the last message
  std::uint32_t sequence{0};  ///< notice: the batch
  std::uint32_t taken{0};     ///< notices of the peer that were delivered so far, modulo 2^32
  std::uint32_t landed{0};    ///< its small batches that landed or were refused so far, modulo 2^32
};
static_assert(sizeof(message_header) == 20);

}  // namespace troupe::transport::rdma
