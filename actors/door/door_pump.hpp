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

/// Carries bytes between an encrypted connection and a socket of this host whose other end has the
/// plain ones. Holds at most 64 KiB each way: where one side does not take, the other is not read.
/// Lives on the loop's thread.
///
/// Ends: what one side has said is carried over before its end is. "Nothing more comes" (a half-close)
/// goes over as that, the other way goes on, until nothing has come for five seconds. A connection that
/// breaks closes the plain side as soon as what had come is taken; one that was reset, a quarter of a
/// second later at most. When nobody has the plain end any more, what it sent still goes out, and what
/// comes is dropped until the peer has heard all and hung up, for five seconds at most.
class door_pump : public std::enable_shared_from_this<door_pump> {
 public:
  door_pump(door_loop& loop, owned_fd net, std::unique_ptr<door_tls_session> tls, owned_fd plain);
  door_pump(const door_pump&) = delete;
  door_pump& operator=(const door_pump&) = delete;
  ~door_pump() = default;

  /// `ended` is called once, after both sockets were closed, perhaps before this returns.
  void begin(std::function<void()> ended);
  /// Closes both; `ended` is not called any more.
  void stop();

 private:
  /// Bytes on their way: filled at the back, emptied at the front.
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
  bool net_ended_{false};     ///< nothing more comes from it
  bool net_broken_{false};    ///< and nothing can be sent to it
  bool net_gone_{false};      ///< the kernel says no more of it; what it has is still to be read
  bool plain_ended_{false};   ///< nothing more comes from it
  bool plain_gone_{false};    ///< and nobody reads it
  bool end_said_net_{false};  ///< the ends that were carried over
  bool end_said_plain_{false};
  bool read_wants_write_{false}, write_wants_write_{false};  ///< of the net
  bool posted_{false};
};

}  // namespace troupe::actors
