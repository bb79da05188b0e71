#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "troupe/kvcache/ids.hpp"
#include "troupe/kvcache/result.hpp"
#include "troupe/transport/types.hpp"

/// The wire format of the tcp backend. PROTOCOL.md describes it in prose; keep the two consistent.
namespace troupe::transport::tcp {

inline constexpr std::uint16_t protocol_version = 2;
inline constexpr std::size_t token_size = 16;
using token = std::array<std::byte, token_size>;

// -- the frame

inline constexpr std::uint16_t frame_magic = 0x5054;  // "TP"
inline constexpr std::size_t header_size = 48;
inline constexpr std::size_t entry_size = 32;
inline constexpr std::size_t trailer_size = 8;
inline constexpr std::uint32_t trailer_mark = 0x444e4554;  // "TEND"
inline constexpr std::size_t max_entries = 192;
inline constexpr std::size_t max_data = std::size_t{2} << 20;
inline constexpr std::size_t max_session = std::size_t{1} << 20;
inline constexpr std::size_t max_completion_body = 4096;
inline constexpr std::size_t max_bad_listed = 512;
inline constexpr std::uint8_t max_lanes = 64;
/// The most read requests on one lane that wait for their data.
inline constexpr std::uint32_t max_open_reads = 256;
/// The largest header with its table, which must fit into the receiver's buffer.
inline constexpr std::size_t max_head = header_size + max_entries * entry_size;

enum class frame_type : std::uint8_t {
  write = 1,         ///< table, session, data, trailer
  read_request = 2,  ///< table
  read_data = 3,     ///< data, trailer
  completion = 4,    ///< session: bad list and sentence
  session = 5,       ///< session
  cancel = 6,        ///< cancels a batch's reads
  // 7 and 8 were a ping and its answer; now the kernel probes a silent peer (`tune_lane`).
  goodbye = 9,  ///< the peer closes the link on purpose
};

enum frame_flag : std::uint8_t {
  flag_last = 1,            ///< the last frame of this batch on this lane
  flag_aborted = 2,         ///< write: the initiator gave the batch up
  flag_end_of_request = 4,  ///< read_data, completion: ends one read_request
};

struct frame_header {
  frame_type type{frame_type::session};
  std::uint8_t flags{0};
  std::uint16_t entries{0};
  std::uint8_t parts{0};   ///< lanes that carry this batch
  std::uint8_t status{0};  ///< completion: 0 or an errc
  std::uint32_t data_size{0};
  std::uint32_t session_size{0};
  std::uint64_t batch{0};
  std::uint64_t grant{0};
  std::uint64_t transfer{0};

  [[nodiscard]] bool has(frame_flag flag) const noexcept { return (flags & flag) != 0; }
};

/// One segment as the target sees it. `index` is the initiator's number of the segment, returned in
/// bad lists.
struct wire_entry {
  std::uint64_t offset{0};
  std::uint64_t stride{0};
  std::uint32_t length{0};
  std::uint32_t count{1};
  std::uint32_t index{0};
};

void encode(const frame_header& header, std::byte* out) noexcept;
void encode(const wire_entry& entry, std::byte* out) noexcept;
void encode_trailer(std::uint32_t status, std::byte* out) noexcept;
/// `invalid_config`: the header violates the protocol; the sentence names the wrong field.
[[nodiscard]] result<frame_header> decode_header(std::span<const std::byte, header_size> in);
[[nodiscard]] wire_entry decode_entry(std::span<const std::byte, entry_size> in) noexcept;
/// Empty if the mark is wrong, which means that the stream is out of step.
[[nodiscard]] std::optional<std::uint32_t> decode_trailer(
    std::span<const std::byte, trailer_size> in) noexcept;

/// What a failed completion carries besides its status.
struct completion_body {
  std::vector<std::uint32_t> bad;
  std::string sentence;
};
[[nodiscard]] std::vector<std::byte> encode(const completion_body& body);
[[nodiscard]] result<completion_body> decode_completion_body(std::span<const std::byte> in);

// -- the handshake of one lane

inline constexpr std::size_t hello_size = 80;
inline constexpr std::size_t reply_size = 48;
inline constexpr std::size_t proof_size = 64;
inline constexpr std::size_t nonce_size = 32;
using nonce = std::array<std::byte, nonce_size>;
using hello_bytes = std::array<std::byte, hello_size>;
using reply_bytes = std::array<std::byte, reply_size>;
using proof_bytes = std::array<std::byte, proof_size>;

/// The dialer's first bytes. Contains no secret: an eavesdropper may read it.
struct hello {
  std::uint16_t lane{0};
  std::uint16_t lanes{0};
  std::uint64_t link{0};  ///< the acceptor's number for the link, from its offer
  incarnation from;
  incarnation to;
  nonce drawn{};  ///< fresh for this connection
};

enum class reply_kind : std::uint8_t {
  refusal = 0,    ///< `status` says why; the connection ends
  challenge = 1,  ///< `body` is the acceptor's nonce: the dialer must prove itself
  verdict = 2,    ///< `body` is the acceptor's proof: the lane is part of the link
};
/// The acceptor's messages. Between challenge and verdict the dialer sends its proofs, without a
/// header.
struct hello_reply {
  reply_kind kind{reply_kind::refusal};
  std::uint8_t status{0};  ///< an errc in a refusal, otherwise 0
  nonce body{};
};

[[nodiscard]] hello_bytes encode(const hello& h) noexcept;
/// `unauthorized` (not a lane's greeting), `version_mismatch`.
[[nodiscard]] result<hello> decode_hello(std::span<const std::byte, hello_size> in);
/// Whether bytes, of any length, may be the start of a readable greeting. Detects a peer of another
/// version without waiting for its whole greeting.
[[nodiscard]] result<void> check_hello_start(std::span<const std::byte> in);
[[nodiscard]] reply_bytes encode(const hello_reply& r) noexcept;
[[nodiscard]] reply_bytes refusal_of(errc why) noexcept;
/// `peer_unreachable` (not a reply of this protocol), `version_mismatch`.
[[nodiscard]] result<hello_reply> decode_reply(std::span<const std::byte, reply_size> in);

// -- the offer

struct offer_payload {
  std::string host;
  std::uint16_t port{0};
  std::uint16_t lanes{0};
  std::uint64_t link{0};
  token secret{};
};
[[nodiscard]] std::vector<std::byte> encode(const offer_payload& offer);
[[nodiscard]] result<offer_payload> decode_offer(std::span<const std::byte> in);

}  // namespace troupe::transport::tcp
