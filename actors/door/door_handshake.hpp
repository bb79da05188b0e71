#pragma once

/// How two ends of a cluster connection prove to each other that they hold the cluster's key, before
/// anything else is read or written. A plain state machine: bytes in, bytes out, a verdict; no clock,
/// no socket, no allocation that a peer could drive.
///
/// Numbers are little-endian. The client is the end that dialled. Four messages:
///
///     HELLO      client -> server   48 bytes: a head and the client's nonce
///     CHALLENGE  server -> client   48 bytes: a head and the server's nonce;
///                                   a refusal is the head alone
///     PROOF      client -> server   40 bytes: code 0, 7 zero bytes, proof(client)
///     VERDICT    server -> client   40 bytes: code 0, 7 zero bytes, proof(server);
///                                   a refusal is its first 8 bytes
///
///     head, 16 bytes
///       0  8  0x89 "TROUPE\n"
///       8  2  version of this protocol (1)
///      10  1  the sender's mode: 0 open, 1 secret, 2 tls
///      11  1  code: 0, or why the sender refuses (`door_refusal`)
///      12  2  HELLO: the port that the client dialled; else zero
///      14  2  zero
///     nonce, 32 bytes: from the kernel's generator, drawn for this connection
///
///     proof(role) = HMAC-SHA256(key, "troupe door " role " v01" | HELLO | CHALLENGE)
///     key         = HMAC-SHA256("troupe door key 1", secret); in mode open of a constant
///
/// What each end learns, and what nobody does:
/// - The server speaks of the key only after the client's proof was right: a stranger that dials
///   gets a nonce, and 16 or 8 bytes that say why it is refused, never anything made with the key
///   that it could try guesses on. The server never sends more bytes than it got.
/// - A client shows its proof to whatever answers at the address. It is made over the server's nonce
///   and good for that one connection only; guessing the secret from it is hopeless where the
///   secret is random (`troupe certs init` draws 256 bits; less than 32 characters are refused).
/// - Replay: each end's nonce is new, and both are in both proofs; what was recorded fits no other
///   connection.
/// - Reflection: the role is in the proof. Who sends a client's own messages back to it, or plays
///   two nodes that dial each other off against one another, holds a proof of the wrong role.
/// - Relaying: in modes secret and tls a server refuses a HELLO for another port than its own, and the
///   port is in both proofs. Who gets a client to dial a port of his on a host of the cluster cannot
///   pass its messages on to a node. A tunnel must have the same number at both ends.
/// - Downgrade: versions, modes and codes of both ends are in both proofs. Who changes one on the way
///   makes the proofs differ; who forges a refusal (it is not authenticated, as refusals cannot be)
///   ends the connection, no more.
/// - Somebody who can change packets on the way can let the two ends prove themselves to each other
///   and take the connection over after that. Modes open and secret do not protect from this: what
///   follows is in the clear. Mode tls does, with the certificates of `door_tls.hpp`.
///
/// First bytes that are not a head's end the connection without a word.

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "troupe/actors/door/door.hpp"

namespace troupe::actors {

using door_key = std::array<std::byte, 32>;
using door_nonce = std::array<std::byte, 32>;

/// The key that a secret gives.
[[nodiscard]] door_key door_key_of(std::string_view secret);
/// The key of mode open, which everybody knows.
[[nodiscard]] door_key open_door_key();

/// Why an end refuses, as it is sent. Append, never renumber.
enum class door_refusal : std::uint8_t {
  none = 0,
  other_version = 1,
  other_mode = 2,
  other_key = 3,
  other_port = 4,
};

/// One end's half of the handshake.
///
///     state          | what arrives                        | then
///     ---------------+-------------------------------------+------------------------------
///     server, hello  | a head of our version and mode      | CHALLENGE; waits for the proof
///                    | a head of another version or mode,  |
///                    | or for another port                 | a refusal; refused
///                    | no head                             | refused, without a word
///     server, proof  | the proof under one of our keys     | VERDICT; proven
///                    | anything else                       | a refusal; refused
///     client, answer | CHALLENGE                           | PROOF; waits for the verdict
///                    | a refusal, or no head               | refused
///     client, verdict| the server's proof                  | proven
///                    | anything else                       | refused
class door_handshake {
 public:
  enum class role : std::uint8_t { client, server };
  enum class state : std::uint8_t { under_way, proven, refused };

  static constexpr std::uint16_t version = 1;
  static constexpr std::size_t head_size = 16, hello_size = 48, proof_size = 40;

  /// `keys`: not empty. A client proves itself with the first; a server takes any, and answers with
  /// the one that the client has, so that a secret can be changed while nodes run. `nonce`: fresh
  /// from the kernel's generator. `port`: the one that the client dialled, or that the server listens
  /// at; not 0 but in mode open.
  door_handshake(role who, door_security::mode mode, std::vector<door_key> keys,
                 const door_nonce& nonce, std::uint16_t port);

  /// How many bytes the end reads next, at most; 0 when it is over. What comes after them belongs to
  /// what follows the handshake and must be left where it is.
  [[nodiscard]] std::size_t wants() const noexcept;
  /// What arrived: at most `wants()` bytes, in pieces of any size.
  void take(std::span<const std::byte> bytes);
  /// What is to be sent; also after the end, where a refusal or the verdict is still to go out.
  [[nodiscard]] std::span<const std::byte> to_send() const noexcept;
  void sent(std::size_t bytes) noexcept;

  [[nodiscard]] state where() const noexcept { return state_; }
  /// In state `refused`: `unauthorized` or `version_mismatch`, and a sentence about "the peer".
  [[nodiscard]] const troupe::error& why() const noexcept { return why_; }
  /// Whether a byte of the peer's was taken.
  [[nodiscard]] bool heard() const noexcept { return heard_; }
  /// Whether the peer's first message is here, whole.
  [[nodiscard]] bool greeted() const noexcept { return greeted_; }
  /// Whether the peer is told why we refuse it.
  [[nodiscard]] bool told() const noexcept { return told_; }

 private:
  void on_head();
  void on_hello();
  void on_proof();
  void on_verdict_code();
  [[nodiscard]] bool first_bytes_fit() const noexcept;
  [[nodiscard]] bool rest_of_head_fits() const noexcept;
  [[nodiscard]] door_key proof_of(role who, const door_key& key) const;
  void refuse(troupe::error why);
  void refuse(door_refusal code, troupe::error why);
  void say(std::span<const std::byte> bytes);

  using hello_bytes = std::array<std::byte, hello_size>;

  role role_;
  door_security::mode mode_;
  std::vector<door_key> keys_;
  std::uint16_t port_;
  state state_{state::under_way};
  bool greeted_{false};  ///< the peer's head and nonce are here
  bool heard_{false};
  bool told_{false};
  troupe::error why_;
  hello_bytes ours_{};                        ///< HELLO or CHALLENGE, as it was sent
  hello_bytes theirs_{};                      ///< and as it came
  std::array<std::byte, proof_size> last_{};  ///< the peer's PROOF or VERDICT
  std::size_t got_{0};                        ///< bytes of the message that is awaited
  std::array<std::byte, hello_size + proof_size> out_{};
  std::size_t out_size_{0}, out_sent_{0};
};

}  // namespace troupe::actors
