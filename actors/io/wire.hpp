#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "troupe/io/descriptor.hpp"
#include "troupe/kvcache/result.hpp"
#include "troupe/transport/types.hpp"

/// What two agents say to each other. On a connection that the doors of both have let through
/// (actors/door/door.hpp), and over the links that it makes. The end that dials uses the other's memory and
/// sends it notices; who wants both ways dials both ways.
///
/// On the connection: messages, each after its length in 4 bytes, at most `max_control`; the first byte
/// is its kind.
///
///     dialer                          acceptor
///                                 <-  challenge
///     hello                       ->
///                                 <-  welcome, or refusal and the end
///     introduction                ->
///                                 <-  accepted, or refusal and the end
///     link_wanted                 ->                    as often as a link is to be made
///                                 <-  link_answer
///     link_over                   ->                    it made none of it, or it broke
///     ping                        <-> pong              at any time
///
/// The hello is proved with the token of the acceptor's descriptor, and so is the welcome:
///
///     proof(role) = HMAC-SHA256(token, label(role) | challenge nonce | hello nonce | lives of both)
///
/// so that the acceptor's token does not travel, nothing can be replayed, and what was made for one life is
/// good for no other. The introduction is the dialer's own descriptor, without memory, so that the acceptor
/// can dial back. It holds the dialer's token, so only an acceptor that has proved itself gets it. Whoever
/// can read the connection reads that token: beyond loopback the door encrypts.
///
/// Over a link, as frames: what `frame_kind` says. The dialer asks for a grant to each memory that it
/// needs, once per link, and leaves at most `max_grants_asked` questions unanswered.
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
/// In a time that does not depend on where they differ.
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
/// How many notices, and bytes of them, one end has had from the other, ever.
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
  notice_count room;             ///< at most so many may be unread
  notice_count received, taken;  ///< of this dialer's life so far
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
  transport::link_offer offer;  ///< where it is not refused
};
struct link_over {
  std::uint32_t attempt{0};
};
struct ping {};
struct pong {};

using control_message = std::variant<challenge, hello, welcome, refusal, introduction, accepted,
                                     link_wanted, link_answer, link_over, ping, pong>;

/// With its length before it.
[[nodiscard]] std::vector<std::byte> encode(const control_message& said);
/// Of a whole message, without its length. `version_mismatch` of a challenge; `unauthorized`: it is none.
[[nodiscard]] result<control_message> decode_control(std::span<const std::byte> bytes);

// -- over a link

enum class frame_kind : std::uint8_t {
  note = 1,            ///< dialer: a notice, the rest of the frame
  grant_wanted = 2,    ///< dialer: for this memory
  grants = 3,          ///< acceptor: one for each part of the memory
  grants_refused = 4,  ///< acceptor
  taken = 5,           ///< acceptor: how many notices came, and how many its program has taken
  count_wanted = 6,    ///< dialer: `taken`, please; some notices may not have arrived
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
  std::uint64_t answers{0};  ///< the number of a `count_wanted`; 0: nobody asked
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
/// `link_broken`: the peer sent what no agent sends.
[[nodiscard]] result<link_frame> decode_frame(std::span<const std::byte> bytes);

}  // namespace troupe::io
