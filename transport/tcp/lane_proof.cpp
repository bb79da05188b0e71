#include "troupe/transport/tcp/lane_proof.hpp"

#include <algorithm>
#include <span>
#include <string_view>

#include <nettle/hmac.h>
#include <nettle/memops.h>

namespace troupe::transport::tcp {

namespace {

/// Labels of equal length, so that label and messages cannot be confused.
constexpr std::string_view dialer_label = "troupe lane dials v2";
constexpr std::string_view acceptor_label = "troupe lane waits v2";
constexpr std::string_view invitation_label = "troupe lane comes v2";
static_assert(dialer_label.size() == acceptor_label.size() &&
              dialer_label.size() == invitation_label.size());

lane_proof proof_under(std::span<const std::byte> key, std::string_view label,
                       const hello_bytes& said, const reply_bytes& challenge) noexcept {
  std::array<std::byte, dialer_label.size() + hello_size + reply_size> text{};
  auto at = std::ranges::copy(std::as_bytes(std::span{label}), text.begin()).out;
  at = std::ranges::copy(said, at).out;
  std::ranges::copy(challenge, at);
  const auto octets = [](std::span<const std::byte> of) {
    return reinterpret_cast<const std::uint8_t*>(of.data());
  };
  hmac_sha256_ctx mac{};
  hmac_sha256_set_key(&mac, key.size(), octets(key));
  hmac_sha256_update(&mac, text.size(), octets(text));
  lane_proof made{};
  hmac_sha256_digest(&mac, made.size(), reinterpret_cast<std::uint8_t*>(made.data()));
  return made;
}

}  // namespace

bool same_proof(const lane_proof& a, const lane_proof& b) noexcept {
  return memeql_sec(a.data(), b.data(), a.size()) != 0;
}

proof_bytes encode(const dialers_proofs& shown) noexcept {
  proof_bytes out{};
  const auto rest = std::ranges::copy(shown.invitation, out.begin()).out;
  std::ranges::copy(shown.proof, rest);
  return out;
}

dialers_proofs decode_proofs(const proof_bytes& in) noexcept {
  dialers_proofs shown;
  const std::span all{in};
  std::ranges::copy(all.first(shown.invitation.size()), shown.invitation.begin());
  std::ranges::copy(all.last(shown.proof.size()), shown.proof.begin());
  return shown;
}

lane_proof prove_invitation(const token& acceptors, const hello_bytes& said,
                            const reply_bytes& challenge) noexcept {
  return proof_under(acceptors, invitation_label, said, challenge);
}

lane_key key_of_lanes(const token& acceptors, const token& dialers) noexcept {
  lane_key key{};
  const auto rest = std::ranges::copy(acceptors, key.begin()).out;
  std::ranges::copy(dialers, rest);
  return key;
}

lane_proof prove_lane(link_role who, const lane_key& key, const hello_bytes& said,
                      const reply_bytes& challenge) noexcept {
  return proof_under(key, who == link_role::initiator ? dialer_label : acceptor_label, said,
                     challenge);
}

}  // namespace troupe::transport::tcp
