#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <variant>
#include <vector>

#include "troupe/io/descriptor.hpp"
#include "troupe/kvcache/result.hpp"
#include "troupe/transport/types.hpp"

/// The protocol of two agents, on a connection that the doors of both have admitted
/// (actors/door/door.hpp) and over the links made through it. The dialer uses the acceptor's memory
/// and sends it notices; for both directions each agent dials the other.
///
/// On the connection: messages, each preceded by its length in 4 bytes, at most `max_control`; the
/// first byte is the kind.
///
///     dialer                          acceptor
///                                 <-  challenge
///     hello                       ->
///                                 <-  welcome, or refusal and the end
///     introduction                ->
///                                 <-  accepted, or refusal and the end
///     link_wanted                 ->                    once per link to be made
///                                 <-  link_answer
///     link_over                   ->                    the link was not made, or broke
///     ping                        <-> pong              at any time
///
/// The token of the acceptor's descriptor proves the hello and the welcome:
///
///     proof(role) = HMAC-SHA256(token, label(role) | challenge nonce | hello nonce | lives of both)
///
/// The acceptor's token does not travel, nothing can be replayed, and a proof for one life is
/// invalid for any other. The introduction is the dialer's own descriptor without memory, so that
/// the acceptor can dial back. It holds the dialer's token, so only an acceptor that has proved
/// itself gets it. An eavesdropper on the connection could read that token: beyond loopback the
/// door encrypts.
///
/// Over a link: frames of the kinds in `frame_kind`. The dialer asks for a grant to each memory
/// that it needs, once per link, with at most `max_grants_asked` questions unanswered.
namespace troupe::io {

inline constexpr std::size_t max_control = std::size_t{64} << 10;
inline constexpr std::uint16_t control_version = 1;
inline constexpr std::size_t max_grants_asked = 256;

using control_nonce = std::array<std::byte, 32>;
using control_proof = std::array<std::byte, 32>;

enum class proof_role : std::uint8_t { dialer, acceptor };
[[nodiscard]] control_proof prove(proof_role who, const agent_token& token,
                                  const control_nonce& challenge, const control_nonce& hello,
                                  incarnation dialer, incarnation acceptor) noexcept;
/// Compares in constant time.
[[nodiscard]] bool same_proof(const control_proof& a, const control_proof& b) noexcept;

// -- on the connection

struct challenge {
  std::uint16_t version{control_version};
  control_nonce nonce{};
};
struct hello {
  incarnation to, from;
  control_nonce nonce{};
  control_proof proof{};
  transport::host_identity where;
};
/// How many notices, and bytes of notices, one end has ever had from the other.
struct notice_count {
  std::uint64_t notices{0}, bytes{0};
  friend bool operator==(const notice_count&, const notice_count&) = default;
};
struct welcome {
  control_proof proof{};
  transport::host_identity where;
};
struct introduction {
  std::vector<std::byte> self;  ///< the dialer's descriptor, without memory
};
struct accepted {
  notice_count room;             ///< the most that may be unread
  notice_count received, taken;  ///< from this life of the dialer so far
};
struct refusal {
  troupe::error why;
};
struct link_wanted {
  std::uint32_t attempt{0};  ///< counts up on one connection
  std::uint32_t lanes{1};
  transport::link_offer offer;  ///< its owner is the dialer
};
struct link_answer {
  std::uint32_t attempt{0};
  std::optional<troupe::error> refused;
  transport::link_offer offer;  ///< if not refused
};
struct link_over {
  std::uint32_t attempt{0};
};
struct ping {};
struct pong {};

using control_message = std::variant<challenge, hello, welcome, refusal, introduction, accepted,
                                     link_wanted, link_answer, link_over, ping, pong>;

/// Encodes the message, preceded by its length.
[[nodiscard]] std::vector<std::byte> encode(const control_message& said);
/// Decodes a whole message without its length. `version_mismatch`: a challenge of another version;
/// `unauthorized`: not a message.
[[nodiscard]] result<control_message> decode_control(std::span<const std::byte> bytes);

// -- over a link

enum class frame_kind : std::uint8_t {
  note = 1,            ///< dialer: a notice, the rest of the frame
  grant_wanted = 2,    ///< dialer: asks for grants to a memory
  grants = 3,          ///< acceptor: one grant for each part of the memory
  grants_refused = 4,  ///< acceptor
  taken = 5,           ///< acceptor: how many notices came, and how many its program has taken
  count_wanted = 6,    ///< dialer: asks for `taken`; some notices may not have arrived
};
struct grant_wanted {
  std::uint64_t memory{0};
};
struct grants {
  std::uint64_t memory{0};
  std::vector<transport::remote_grant> parts;
};
struct grants_refused {
  std::uint64_t memory{0};
  troupe::error why;
};
struct taken {
  notice_count received, taken;
  std::uint64_t answers{0};  ///< the number of the `count_wanted` that it answers; 0: unasked
};
struct count_wanted {
  std::uint64_t number{0};  ///< not 0; `taken` repeats it
};
/// Views the frame that it was decoded from.
struct note {
  std::span<const std::byte> bytes;
};
using link_frame = std::variant<note, grant_wanted, grants, grants_refused, taken, count_wanted>;

[[nodiscard]] std::vector<std::byte> encode_frame(const link_frame& said);
/// `link_broken`: not a frame that an agent sends.
[[nodiscard]] result<link_frame> decode_frame(std::span<const std::byte> bytes);

}  // namespace troupe::io
