#include "troupe/actors/door/door_handshake.hpp"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>

#include "troupe/transport/random.hpp"

namespace troupe::actors {

namespace {

constexpr std::array<unsigned char, 8> magic{0x89, 'T', 'R', 'O', 'U', 'P', 'E', '\n'};
constexpr std::size_t version_at = 8, mode_at = 10, code_at = 11, port_at = 12, zeros_at = 14;
/// Size of the code and the zeros before a proof.
constexpr std::size_t verdict_head = 8;

/// Labels of equal length: the boundary between role and messages is unambiguous.
constexpr std::string_view client_label = "troupe door client v01";
constexpr std::string_view server_label = "troupe door server v01";
static_assert(client_label.size() == server_label.size());

door_key hmac(std::span<const std::byte> key, std::span<const std::byte> text) {
  door_key out{};
  unsigned size = out.size();
  const auto* made = ::HMAC(::EVP_sha256(), key.data(), static_cast<int>(key.size()),
                            reinterpret_cast<const unsigned char*>(text.data()), text.size(),
                            reinterpret_cast<unsigned char*>(out.data()), &size);
  // On failure (out of memory, for example): an unpredictable proof, not one of zeros.
  if (made == nullptr || size != out.size()) transport::random_bytes(out);
  return out;
}

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span{text.data(), text.size()});
}

std::array<std::byte, door_handshake::head_size> head_of(door_security::mode mode,
                                                         door_refusal code) {
  std::array<std::byte, door_handshake::head_size> head{};
  std::memcpy(head.data(), magic.data(), magic.size());
  head[version_at] = std::byte{door_handshake::version & 0xffu};
  head[version_at + 1] = std::byte{door_handshake::version >> 8u};
  head[mode_at] = static_cast<std::byte>(mode);
  head[code_at] = static_cast<std::byte>(code);
  return head;
}

std::string mode_name(std::byte mode) {
  switch (std::to_integer<unsigned>(mode)) {
    case 0: return "none";
    case 1: return "secret";
    case 2: return "tls";
    default: return std::to_string(std::to_integer<unsigned>(mode));
  }
}

troupe::error another_mode(std::byte theirs, door_security::mode ours) {
  return {errc::unauthorized, "the peer's security.mode is " + mode_name(theirs) + ", ours is " +
                                  mode_name(static_cast<std::byte>(ours)) +
                                  "; give every node the same"};
}

troupe::error another_version(unsigned theirs) {
  return {errc::version_mismatch, "the peer speaks version " + std::to_string(theirs) +
                                      " of the cluster port's protocol, we speak version " +
                                      std::to_string(unsigned{door_handshake::version}) +
                                      "; run the same release of Troupe on every node"};
}

troupe::error another_key(door_security::mode mode) {
  if (mode == door_security::mode::open)
    return {errc::unauthorized, "the peer violates the protocol of the cluster port"};
  return {errc::unauthorized,
          "the peer has another secret; give every node the same file (security.secret)"};
}

troupe::error another_port() {
  return {errc::unauthorized,
          "the node listens at another port than the one that was dialled: a tunnel or a mapping "
          "changes the number, or somebody passes messages on; use the same port at both ends"};
}

troupe::error unknown_reason(std::byte code) {
  return {errc::version_mismatch,
          "the peer refuses us, for a reason that this release does not know (" +
              std::to_string(std::to_integer<unsigned>(code)) + ")"};
}

bool all_zero(std::span<const std::byte> bytes) {
  return std::ranges::all_of(bytes, [](std::byte b) { return b == std::byte{0}; });
}

}  // namespace

door_key door_key_of(std::string_view secret) {
  return hmac(bytes_of("troupe door key 1"), bytes_of(secret));
}

door_key open_door_key() {
  return door_key_of("open");
}

door_handshake::door_handshake(role who, door_security::mode mode, std::vector<door_key> keys,
                               const door_nonce& nonce, std::uint16_t port)
    : role_{who}, mode_{mode}, keys_{std::move(keys)}, port_{port} {
  const auto head = head_of(mode_, door_refusal::none);
  std::ranges::copy(head, ours_.begin());
  std::ranges::copy(nonce, ours_.begin() + head_size);
  if (role_ != role::client) return;
  ours_[port_at] = static_cast<std::byte>(port_ & 0xffu);
  ours_[port_at + 1] = static_cast<std::byte>(port_ >> 8u);
  say(ours_);
}

std::size_t door_handshake::wants() const noexcept {
  if (state_ != state::under_way) return 0;
  // A refusal is shorter than the message that it replaces, and ends with its code.
  if (!greeted_) return (got_ < head_size ? head_size : hello_size) - got_;
  return (got_ < verdict_head ? verdict_head : proof_size) - got_;
}

void door_handshake::take(std::span<const std::byte> bytes) {
  while (!bytes.empty() && wants() > 0) {
    heard_ = true;
    const auto piece = bytes.first(std::min(bytes.size(), wants()));
    bytes = bytes.subspan(piece.size());
    auto* into = greeted_ ? last_.data() : theirs_.data();
    std::memcpy(into + got_, piece.data(), piece.size());
    got_ += piece.size();
    if (!greeted_) {
      if (!first_bytes_fit()) {
        refuse({errc::version_mismatch,
                "the peer's first bytes are not those of a node of Troupe of this release"});
      } else if (got_ == head_size) {
        on_head();
      } else if (got_ == hello_size) {
        on_hello();
      }
    } else if (got_ == verdict_head) {
      on_verdict_code();
    } else if (got_ == proof_size) {
      on_proof();
    }
  }
}

std::span<const std::byte> door_handshake::to_send() const noexcept {
  return std::span{out_}.subspan(out_sent_, out_size_ - out_sent_);
}

void door_handshake::sent(std::size_t bytes) noexcept {
  out_sent_ += std::min(bytes, out_size_ - out_sent_);
  if (out_sent_ == out_size_) out_sent_ = out_size_ = 0;
}

bool door_handshake::first_bytes_fit() const noexcept {
  return std::memcmp(theirs_.data(), magic.data(), std::min(got_, magic.size())) == 0;
}

bool door_handshake::rest_of_head_fits() const noexcept {
  // Only a client sends a port.
  const auto from = role_ == role::server ? zeros_at : port_at;
  return all_zero(std::span{theirs_}.subspan(from, head_size - from));
}

void door_handshake::on_head() {
  const unsigned low = std::to_integer<unsigned>(theirs_[version_at]);
  const unsigned high = std::to_integer<unsigned>(theirs_[version_at + 1]);
  const unsigned number = low | (high << 8u);
  const unsigned port = std::to_integer<unsigned>(theirs_[port_at]) |
                        (std::to_integer<unsigned>(theirs_[port_at + 1]) << 8u);
  const auto code = theirs_[code_at];
  const bool asks = role_ == role::server;
  if (number != version) {
    const auto why = another_version(number);
    asks ? refuse(door_refusal::other_version, why) : refuse(why);
  } else if (theirs_[mode_at] != static_cast<std::byte>(mode_)) {
    const auto why = another_mode(theirs_[mode_at], mode_);
    asks ? refuse(door_refusal::other_mode, why) : refuse(why);
  } else if (!asks && code == static_cast<std::byte>(door_refusal::other_port)) {
    refuse(another_port());
  } else if (asks && mode_ != door_security::mode::open && !(port_ != 0 && port == port_)) {
    refuse(door_refusal::other_port, another_port());
  } else if (code != std::byte{0} || !rest_of_head_fits()) {
    refuse(unknown_reason(code));
  }
}

void door_handshake::on_hello() {
  greeted_ = true;
  got_ = 0;
  if (role_ == role::server) {
    say(ours_);
    return;
  }
  std::array<std::byte, proof_size> message{};
  std::ranges::copy(proof_of(role::client, keys_.front()), message.begin() + verdict_head);
  say(message);
}

void door_handshake::on_verdict_code() {
  const auto code = last_[0];
  if (code == std::byte{0} && all_zero(std::span{last_}.first(verdict_head))) return;
  if (role_ == role::client && code == static_cast<std::byte>(door_refusal::other_key)) {
    refuse(another_key(mode_));
  } else {
    refuse(unknown_reason(code));
  }
}

void door_handshake::on_proof() {
  const auto shown = std::span{last_}.subspan(verdict_head);
  const auto right = [&](role who, const door_key& key) {
    return ::CRYPTO_memcmp(proof_of(who, key).data(), shown.data(), shown.size()) == 0;
  };
  if (role_ == role::client) {
    if (!right(role::server, keys_.front())) {
      refuse({errc::unauthorized,
              "the peer has not proved that it has the secret that we have; somebody else may "
              "listen there"});
      return;
    }
    state_ = state::proven;
    return;
  }
  const auto key =
      std::ranges::find_if(keys_, [&](const door_key& mine) { return right(role::client, mine); });
  if (key == keys_.end()) {
    refuse(door_refusal::other_key, another_key(mode_));
    return;
  }
  std::array<std::byte, proof_size> message{};
  std::ranges::copy(proof_of(role::server, *key), message.begin() + verdict_head);
  say(message);
  state_ = state::proven;
}

door_key door_handshake::proof_of(role who, const door_key& key) const {
  const auto& hello = role_ == role::client ? ours_ : theirs_;
  const auto& challenge = role_ == role::client ? theirs_ : ours_;
  std::array<std::byte, client_label.size() + 2 * hello_size> text{};
  auto at = text.begin();
  at = std::ranges::copy(bytes_of(who == role::client ? client_label : server_label), at).out;
  at = std::ranges::copy(hello, at).out;
  std::ranges::copy(challenge, at);
  return hmac(key, text);
}

void door_handshake::refuse(troupe::error why) {
  state_ = state::refused;
  why_ = std::move(why);
}

void door_handshake::refuse(door_refusal code, troupe::error why) {
  if (greeted_) {
    std::array<std::byte, verdict_head> message{};
    message[0] = static_cast<std::byte>(code);
    say(message);
  } else {
    say(head_of(mode_, code));
  }
  told_ = true;
  refuse(std::move(why));
}

void door_handshake::say(std::span<const std::byte> bytes) {
  const auto room = std::span{out_}.subspan(out_size_);
  const auto size = std::min(bytes.size(), room.size());  // there is room for a hello and a proof
  std::memcpy(room.data(), bytes.data(), size);
  out_size_ += size;
}

}  // namespace troupe::actors
