#pragma once

/// TLS after the handshake of `door_handshake.hpp`: version 1.3 only, certificates at both ends, no
/// session resumption. A certificate is accepted if an authority of the file `ca` signed it, it is
/// within its validity period, and it is for the URI `troupe:CLUSTER`. Host names are not checked:
/// a peer must belong to the cluster, wherever it runs.
///
/// Once both ends accept each other, the server sends one byte (1) inside TLS, and the client waits
/// for it: in TLS 1.3 a client is done before the server has checked its certificate, and would
/// otherwise accept a connection that is refused a moment later.
///
/// Renewing, while nodes run:
/// - a certificate: replace `key` and `certificate` (`troupe certs renew DIR` does so in a safe
///   order); new connections use it, existing ones stay.
/// - the authority: append the new one to `ca` on every node; then give every node a certificate of the
///   new one; then remove the old one from `ca` on every node.

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

/// Certificate, key and authorities, as read at one time.
class door_tls_context {
 public:
  /// `invalid_config` naming the file: unreadable, a key that others can read, not for this
  /// cluster, of another authority, not yet valid or expired, key and certificate that do not
  /// belong together.
  [[nodiscard]] static result<std::shared_ptr<const door_tls_context>> load(
      const door_security& security);
  door_tls_context(const door_tls_context&) = delete;
  door_tls_context& operator=(const door_tls_context&) = delete;
  ~door_tls_context();

  [[nodiscard]] ssl_ctx_st* get() const noexcept { return context_; }
  /// Which expires first: our certificate or one that it depends on.
  enum class part : std::uint8_t {
    node,          ///< our certificate
    intermediate,  ///< one in the same file as ours
    authority,     ///< one of the file `ca`
  };
  [[nodiscard]] part first_to_end() const noexcept { return end_.whose; }
  /// The time until `first_to_end` expires; 0 or negative once it has.
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
  std::string uri_;  ///< must be in a peer's certificate
  end end_;
};

/// The criterion for a peer's chain during the TLS handshake, and the place of its first fault.
struct door_tls_judgement {
  const std::string* uri{nullptr};
  int depth{0};  ///< 0: the peer's own certificate; above: its signers
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
    wants_read,   ///< call again when the socket is readable
    wants_write,  ///< call again when the socket is writable
    ended,        ///< the peer sends nothing more
    broken,       ///< the connection is unusable
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

  /// Call until it returns `done` (both certificates accepted and confirmed) or `broken`.
  [[nodiscard]] step greet();
  [[nodiscard]] moved read(std::span<std::byte> into);
  [[nodiscard]] moved write(std::span<const std::byte> from);
  /// Tells the peer that we send nothing more. The peer may still send.
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
