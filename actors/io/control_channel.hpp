#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "troupe/actors/door/door_loop.hpp"
#include "troupe/io/wire.hpp"

namespace troupe::io {

/// Messages over one connection that the door has admitted. Lives on the loop's thread. Pings the
/// peer, and ends the connection when the peer has been silent for too long.
class control_channel : public std::enable_shared_from_this<control_channel> {
 public:
  using clock = actors::door_loop::clock;
  struct listener {
    std::function<void(control_message)> on_message;
    /// At most once; not after `close`. `peer_lost`, `unauthorized` (the bytes are not a message).
    std::function<void(troupe::error why)> on_end;
  };

  control_channel(actors::door_loop& loop, actors::owned_fd fd, std::chrono::milliseconds silence);
  control_channel(const control_channel&) = delete;
  control_channel& operator=(const control_channel&) = delete;
  ~control_channel() = default;

  /// Called once, before anything is sent.
  void begin(listener tell);
  /// A message that cannot be sent ends the connection.
  void send(const control_message& said);
  /// Closes the connection without a call of `on_end`; bytes already in the socket still go out.
  void close();
  [[nodiscard]] bool open() const noexcept { return static_cast<bool>(fd_); }
  /// Whether the peer has closed the connection, in good order or by its process's end, rather than
  /// falling silent.
  [[nodiscard]] bool closed_by_peer() const noexcept { return closed_by_peer_; }

 private:
  void on_ready(std::uint32_t events);
  /// Returns false if the connection has ended.
  [[nodiscard]] bool read_some();
  void take_messages();
  void flush();
  void look();
  void end(troupe::error why);

  static constexpr std::size_t max_waiting = std::size_t{1} << 20;

  actors::door_loop& loop_;
  actors::owned_fd fd_;
  const std::chrono::milliseconds silence_;
  listener tell_;
  actors::door_loop::id watch_{0};
  actors::door_loop::id timer_{0};
  clock::time_point heard_;
  bool closed_by_peer_{false};
  std::vector<std::byte> in_, out_;
};

}  // namespace troupe::io
