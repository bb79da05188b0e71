#pragma once

#include <array>
#include <cstddef>

#include "troupe/transport/backend.hpp"
#include "troupe/transport/tcp/wire.hpp"

/// How the two ends of a lane prove to each other that they hold both offers of the link. The keys
/// are the secrets of the offers; they never travel over the lane.
///
///     invitation  = HMAC-SHA256(acceptor's secret, "troupe lane comes v2" | hello | challenge)
///     proof(role) = HMAC-SHA256(acceptor's secret | dialer's secret,
///                               label(role) | hello | challenge)
///     label       = "troupe lane dials v2" or "troupe lane waits v2"
///
/// `hello` and `challenge` are the messages as sent, with both nonces, both incarnations, the link,
/// the lane's number and the number of lanes. A proof is therefore valid for no other connection,
/// no other lane and no other incarnation, and the role keeps one end's proof from being shown as
/// the other's.
namespace troupe::transport::tcp {

using lane_key = std::array<std::byte, 2 * token_size>;
using lane_proof = std::array<std::byte, 32>;
static_assert(sizeof(lane_proof) == nonce_size && 2 * sizeof(lane_proof) == proof_size);

/// What the dialer shows. An acceptor can check `invitation` before it has the dialer's offer.
struct dialers_proofs {
  lane_proof invitation{};
  lane_proof proof{};
};
/// Compares in constant time.
[[nodiscard]] bool same_proof(const lane_proof& a, const lane_proof& b) noexcept;
[[nodiscard]] proof_bytes encode(const dialers_proofs& shown) noexcept;
[[nodiscard]] dialers_proofs decode_proofs(const proof_bytes& in) noexcept;

/// The proof that the dialer was given the acceptor's offer.
[[nodiscard]] lane_proof prove_invitation(const token& acceptors, const hello_bytes& said,
                                          const reply_bytes& challenge) noexcept;
[[nodiscard]] lane_key key_of_lanes(const token& acceptors, const token& dialers) noexcept;
[[nodiscard]] lane_proof prove_lane(link_role who, const lane_key& key, const hello_bytes& said,
                                    const reply_bytes& challenge) noexcept;

}  // namespace troupe::transport::tcp
