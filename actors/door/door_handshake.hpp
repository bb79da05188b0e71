#pragma once

/// How the two ends of a cluster connection prove to each other that they hold the cluster's key,
/// before anything else is read or written. A plain state machine: bytes in, bytes out, a verdict;
/// no clock, no socket, no allocation under a peer's control.
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
/// Security properties:
/// - The server sends nothing derived from the key until the client's proof was right: a stranger
///   that dials gets a nonce, and a refusal of 16 or 8 bytes, and nothing to test guesses against.
///   The server never sends more bytes than it has received.
/// - A client shows its proof to any server that answers at the address. The proof covers the
///   server's nonce and is valid for that one connection only; guessing the secret from it is
///   infeasible if the secret is random (`troupe certs init` draws 256 bits; less than 32
///   characters are refused).
/// - Replay: each end's nonce is new, and both proofs cover both nonces; a recorded message fits no
///   other connection.
/// - Reflection: the role is in the proof. An attacker that sends a client's own messages back to
///   it, or plays two nodes that dial each other off against one another, holds a proof of the
///   wrong role.
/// - Relaying: in modes secret and tls a server refuses a HELLO for a port other than its own, and
///   both proofs cover the port. An attacker that gets a client to dial the attacker's port on a
///   host of the cluster cannot pass the messages on to a node. A tunnel must have the same port at
///   both ends.
/// - Downgrade: both proofs cover the versions, modes and codes of both ends. Changing one in
///   transit makes the proofs differ; a forged refusal (refusals cannot be authenticated) ends the
///   connection, no more.
/// - An attacker that can change packets in transit can let the two ends prove themselves to each
///   other and then take the connection over. Modes open and secret do not protect against this:
///   they send everything that follows in the clear. Mode tls does, with the certificates of
///   `door_tls.hpp`.
///
/// If the first bytes are not a head, the connection is closed without an answer.

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

/// Derives the key from a secret.
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
///                    | no head                             | refused, without an answer
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

  /// `keys`: not empty. A client proves itself with the first; a server accepts any, and answers
  /// with the client's key, so that a secret can be changed while nodes run. `nonce`: fresh from
  /// the kernel's generator. `port`: the port that the client dialled, or that the server listens
  /// on; 0 only in mode open.
  door_handshake(role who, door_security::mode mode, std::vector<door_key> keys,
                 const door_nonce& nonce, std::uint16_t port);

  /// The most bytes to read next; 0 when the handshake is over. Bytes beyond them belong to the
  /// protocol after the handshake and must be left in the socket.
  [[nodiscard]] std::size_t wants() const noexcept;
  /// Takes received bytes: at most `wants()`, in pieces of any size.
  void take(std::span<const std::byte> bytes);
  /// The bytes to send; after the end, too, while a refusal or the verdict is still to go out.
  [[nodiscard]] std::span<const std::byte> to_send() const noexcept;
  void sent(std::size_t bytes) noexcept;

  [[nodiscard]] state where() const noexcept { return state_; }
  /// In state `refused`: `unauthorized` or `version_mismatch`, and a sentence about "the peer".
  [[nodiscard]] const troupe::error& why() const noexcept { return why_; }
  /// Whether the peer has sent any byte.
  [[nodiscard]] bool heard() const noexcept { return heard_; }
  /// Whether the peer's first message has arrived in full.
  [[nodiscard]] bool greeted() const noexcept { return greeted_; }
  /// Whether a refusal is sent to the peer.
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
  bool greeted_{false};  ///< the peer's head and nonce have arrived
  bool heard_{false};
  bool told_{false};
  troupe::error why_;
  hello_bytes ours_{};                        ///< HELLO or CHALLENGE as sent
  hello_bytes theirs_{};                      ///< HELLO or CHALLENGE as received
  std::array<std::byte, proof_size> last_{};  ///< the peer's PROOF or VERDICT
  std::size_t got_{0};                        ///< received bytes of the awaited message
  std::array<std::byte, hello_size + proof_size> out_{};
  std::size_t out_size_{0}, out_sent_{0};
};

}  // namespace troupe::actors
