#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "troupe/actors/door/door_credentials.hpp"
#include "troupe/actors/door/door_eviction.hpp"
#include "troupe/actors/door/door_handshake.hpp"
#include "troupe/actors/door/door_loop.hpp"
#include "troupe/actors/door/door_tls.hpp"

namespace troupe::actors {

/// The result of a successful greeting.
struct proven_connection {
  owned_fd fd;
  std::unique_ptr<door_tls_session> tls;  ///< over `fd`, in mode tls
};

/// One connection from its first byte until both ends have proved themselves (in mode tls with
/// their certificates, too) or the peer is refused. Lives on the loop's thread. Never reads beyond
/// the handshake.
class door_greeting : public std::enable_shared_from_this<door_greeting> {
 public:
  using outcome = std::function<void(result<proven_connection>)>;

  /// `port`: the port of the listening end.
  door_greeting(door_loop& loop, owned_fd fd, door_handshake::role who, std::uint16_t port,
                std::shared_ptr<const door_credentials> credentials);
  door_greeting(const door_greeting&) = delete;
  door_greeting& operator=(const door_greeting&) = delete;
  ~door_greeting() = default;

  /// `then` is called once, possibly before this returns. Errors speak of "the peer":
  /// `unauthorized`, `version_mismatch`, `link_broken` (the peer hung up), `deadline`.
  void begin(door_loop::clock::time_point until, outcome then);
  /// Closes the connection; `then` is not called any more.
  void give_up();

  /// Reads the bytes that have arrived since the loop's last turn. May end the greeting, as any
  /// event.
  void catch_up();

  [[nodiscard]] door_stage stage() const noexcept { return stage_; }
  /// When the greeting came to `stage()`.
  [[nodiscard]] door_loop::clock::time_point stage_began() const noexcept { return stage_began_; }
  /// Whether the peer has proved that it has the key; in mode tls its certificate is next.
  [[nodiscard]] bool has_key() const noexcept { return stage_ == door_stage::proven; }
  /// Whether `then` was called or will never be called.
  [[nodiscard]] bool ended() const noexcept { return !then_; }
  [[nodiscard]] int fd() const noexcept { return fd_.get(); }

 private:
  void on_ready();
  /// Returns whether the greeting can continue at once.
  [[nodiscard]] bool send_some();
  [[nodiscard]] bool read_some();
  void enter_stage();
  void secure();
  void part();
  void discard_some();
  void on_time();
  void finish(result<proven_connection> how);
  void finish_hung_up(int number);

  door_loop& loop_;
  owned_fd fd_;
  door_handshake::role role_;
  std::shared_ptr<const door_credentials> credentials_;
  door_handshake handshake_;
  std::unique_ptr<door_tls_session> tls_;
  outcome then_;
  door_loop::id watch_{0};
  door_loop::id timer_{0};
  door_stage stage_{door_stage::silent};
  door_loop::clock::time_point stage_began_;
  bool parting_{false};  ///< the refusal was sent; waiting for the peer to hang up
  std::size_t discarded_{0};
};

}  // namespace troupe::actors
