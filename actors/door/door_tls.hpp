#pragma once

/// TLS behind the handshake of `door_handshake.hpp`: version 1.3 only, certificates at both ends, no
/// session is resumed. A certificate is good that an authority of the file `ca` signed, whose time it
/// is, and that is for the URI `troupe:CLUSTER`; host names play no part: what counts is that a peer
/// belongs to the cluster, wherever it runs.
///
/// When both ends are content, the server sends one byte (1) inside TLS, which the client waits for: in TLS
/// 1.3 a client is done before the server has looked at its certificate, and would take a connection
/// for good that is refused a moment later.
///
/// Renewing, while nodes run:
/// - a certificate: replace `key` and `certificate` (`troupe certs renew DIR` does, in an order that is
///   safe); connections made from then on use it, those that are there stay.
/// - the authority: append the new one to `ca` on every node; then give every node a certificate of the
///   new one; then take the old one out of `ca` on every node.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "troupe/actors/door/door.hpp"
#include "troupe/actors/door/door_handshake.hpp"

struct ssl_st;
struct ssl_ctx_st;

namespace troupe::actors {

/// Certificate, key and authorities, as they were read at one time.
class door_tls_context {
 public:
  /// `invalid_config` naming the file: unreadable, a key that others can read, none of the cluster, of
  /// another authority, before or past its time, key and certificate that do not belong together.
  [[nodiscard]] static result<std::shared_ptr<const door_tls_context>> load(
      const door_security& security);
  door_tls_context(const door_tls_context&) = delete;
  door_tls_context& operator=(const door_tls_context&) = delete;
  ~door_tls_context();

  [[nodiscard]] ssl_ctx_st* get() const noexcept { return context_; }
  /// Whose time is over first, of our certificate and those that make it good.
  enum class part : std::uint8_t {
    node,          ///< our certificate
    intermediate,  ///< one that comes with ours, in the same file
    authority,     ///< one of the file `ca`
  };
  [[nodiscard]] part first_to_end() const noexcept { return end_.whose; }
  /// Until that expires; not above 0 once it has.
  [[nodiscard]] std::chrono::seconds time_left() const;
  [[nodiscard]] const std::string& uri() const noexcept { return uri_; }

 private:
  struct end {
    std::chrono::system_clock::time_point when;
    part whose{part::node};
  };
  static result<end> judge_own(ssl_ctx_st* with, const door_security& security,
                               const std::string& uri);
  door_tls_context(ssl_ctx_st* context, std::string uri, end first)
      : context_{context}, uri_{std::move(uri)}, end_{first} {}

  ssl_ctx_st* context_;
  std::string uri_;  ///< what a peer's certificate must be for
  end end_;
};

/// What a peer's chain is judged by while TLS greets it, and where in it the first fault was.
struct door_tls_judgement {
  const std::string* uri{nullptr};
  int depth{0};  ///< 0: the peer's own certificate, above it: who signed it
};

/// What to do about an authority that has expired.
inline constexpr const char* new_authority_advice =
    "make a new authority in another folder (`troupe certs init DIR`), append its certificate to "
    "security.ca on every host, then give every host a certificate of the new one";

/// One connection's TLS over a non-blocking socket, which must outlive it.
class door_tls_session {
 public:
  enum class step : std::uint8_t {
    done,         ///< some bytes, or the whole handshake
    wants_read,   ///< again when the socket is readable
    wants_write,  ///< again when it is writable
    ended,        ///< the peer has said that nothing more comes
    broken,       ///< the connection is of no more use
  };
  struct moved {
    step how{};
    std::size_t bytes{0};
  };

  [[nodiscard]] static result<std::unique_ptr<door_tls_session>> create(
      std::shared_ptr<const door_tls_context> context, int fd, door_handshake::role who);
  door_tls_session(const door_tls_session&) = delete;
  door_tls_session& operator=(const door_tls_session&) = delete;
  ~door_tls_session();

  /// Until it is `done`, both certificates accepted and that confirmed, or `broken`.
  [[nodiscard]] step greet();
  [[nodiscard]] moved read(std::span<std::byte> into);
  [[nodiscard]] moved write(std::span<const std::byte> from);
  /// Tells the peer that nothing more comes. It may still send.
  [[nodiscard]] step say_end();

  /// After `broken`: `unauthorized` (which certificate is not accepted, and why), `link_broken`.
  [[nodiscard]] const troupe::error& why() const noexcept { return why_; }

 private:
  door_tls_session(std::shared_ptr<const door_tls_context> context,
                   std::unique_ptr<door_tls_judgement> judgement, ssl_st* ssl,
                   door_handshake::role who);
  [[nodiscard]] step outcome(int returned);
  [[nodiscard]] troupe::error reason(int number);

  std::shared_ptr<const door_tls_context> context_;
  std::unique_ptr<door_tls_judgement> judgement_;  ///< OpenSSL holds its address
  ssl_st* ssl_;
  door_handshake::role role_;
  bool secured_{false};
  troupe::error why_;
};

}  // namespace troupe::actors
