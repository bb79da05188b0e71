#pragma once

#include <array>
#include <cstddef>

#include "troupe/transport/backend.hpp"
#include "troupe/transport/tcp/wire.hpp"

/// How the two ends of a lane prove to each other that they hold both offers of the link. The secrets
/// of the offers are the keys; they never travel over the lane.
///
///     invitation  = HMAC-SHA256(acceptor's secret, "troupe lane comes v2" | hello | challenge)
///     proof(role) = HMAC-SHA256(acceptor's secret | dialer's secret,
///                               label(role) | hello | challenge)
///     label       = "troupe lane dials v2" or "troupe lane waits v2"
///
/// `hello` and `challenge` are the messages as they were sent: both nonces, both incarnations, the
/// link, the number of the lane and how many there are. So a proof fits no other connection, no other
/// lane and no other life of a node, and the role keeps one end's proof from being shown as the other's.
namespace troupe::transport::tcp {

using lane_key = std::array<std::byte, 2 * token_size>;
using lane_proof = std::array<std::byte, 32>;
static_assert(sizeof(lane_proof) == nonce_size && 2 * sizeof(lane_proof) == proof_size);

/// What the dialer shows. An acceptor can check the first before it was given the dialer's offer.
struct dialers_proofs {
  lane_proof invitation{};
  lane_proof proof{};
};
/// Takes as long for any two.
[[nodiscard]] bool same_proof(const lane_proof& a, const lane_proof& b) noexcept;
[[nodiscard]] proof_bytes encode(const dialers_proofs& shown) noexcept;
[[nodiscard]] dialers_proofs decode_proofs(const proof_bytes& in) noexcept;

/// That the dialer was given the acceptor's offer.
[[nodiscard]] lane_proof prove_invitation(const token& acceptors, const hello_bytes& said,
                                          const reply_bytes& challenge) noexcept;
[[nodiscard]] lane_key key_of_lanes(const token& acceptors, const token& dialers) noexcept;
[[nodiscard]] lane_proof prove_lane(link_role who, const lane_key& key, const hello_bytes& said,
                                    const reply_bytes& challenge) noexcept;

}  // namespace troupe::transport::tcp
