#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "troupe/actors/door/door_loop.hpp"
#include "troupe/actors/door/door_tls.hpp"

namespace troupe::actors {

/// Carries bytes between an encrypted connection ("net") and a local socket that carries the plain
/// bytes ("plain"). Buffers at most 64 KiB each way: while one side takes nothing, the other is not
/// read. Lives on the loop's thread.
///
/// The end of one side is passed on after all of its bytes. A half-close is passed on as a
/// half-close; the other direction continues until nothing has arrived for five seconds. When the
/// connection breaks, the plain side is closed once the bytes received before are taken; after a
/// reset, within a quarter of a second at most. When the plain socket's other end is closed, its
/// bytes still go out, and incoming bytes are dropped until the peer has received everything and
/// hung up, for five seconds at most.
class door_pump : public std::enable_shared_from_this<door_pump> {
 public:
  door_pump(door_loop& loop, owned_fd net, std::unique_ptr<door_tls_session> tls, owned_fd plain);
  door_pump(const door_pump&) = delete;
  door_pump& operator=(const door_pump&) = delete;
  ~door_pump() = default;

  /// `ended` is called once, after both sockets were closed, possibly before this returns.
  void begin(std::function<void()> ended);
  /// Closes both sockets; `ended` is not called any more.
  void stop();

 private:
  /// A buffer, filled at the back and emptied at the front.
  class stretch {
   public:
    stretch();
    [[nodiscard]] std::span<std::byte> room() noexcept;
    [[nodiscard]] std::span<const std::byte> filled() const noexcept;
    void add(std::size_t bytes) noexcept { to_ += bytes; }
    void take(std::size_t bytes) noexcept;
    void clear() noexcept { from_ = to_ = 0; }

   private:
    std::vector<std::byte> bytes_;
    std::size_t from_{0}, to_{0};
  };

  void on_net(std::uint32_t events);
  void on_plain(std::uint32_t events);
  void turn();
  [[nodiscard]] std::size_t read_net();
  [[nodiscard]] std::size_t write_plain();
  [[nodiscard]] std::size_t read_plain();
  [[nodiscard]] std::size_t write_net();
  void carry_ends();
  void plain_is_gone();
  void give_it(std::chrono::milliseconds time);
  [[nodiscard]] bool over() const noexcept;
  void ask_for_events();
  void finish();

  door_loop& loop_;
  owned_fd net_, plain_;
  std::unique_ptr<door_tls_session> tls_;
  std::function<void()> ended_;
  door_loop::id net_watch_{0}, plain_watch_{0}, linger_{0};
  stretch in_, out_;
  bool net_ended_{false};     ///< nothing more arrives from the net
  bool net_broken_{false};    ///< and nothing can be sent to it
  bool net_gone_{false};      ///< no longer watched; its remaining bytes are still to be read
  bool plain_ended_{false};   ///< nothing more arrives from the plain side
  bool plain_gone_{false};    ///< and nobody reads it
  bool end_said_net_{false};  ///< the end of one side was passed on to the other
  bool end_said_plain_{false};
  bool read_wants_write_{false}, write_wants_write_{false};  ///< TLS needs a writable net
  bool posted_{false};
};

}  // namespace troupe::actors
