#pragma once

/// Judges from what was heard of a peer, and when, whether it still lives. A plain state machine: time
/// is passed in. No CAF here.

#include <chrono>

namespace troupe::actors {

/// Of one link, while something is in flight on it. Its owner looks every `period`, and does what the
/// look says. Silence is counted from the last sign of life that came over the link, and never while
/// nobody looked: who stood still itself starts over.
///
///   silence, in parts of the patience   what to do
///   ----------------------------------  ----------
///   less than 1/4                       `nothing`
///   from 1/4                            `ask` over the link, again after each quarter
///   from 1/2                            `ask_both_ways`: also the process that holds the other end
///   from 3/4, the process has answered  `link_is_silent`: it lives, the link does not
///   from 3/4, nor has the process       `peer_is_silent`: it stands still, or is cut off
///
/// So a peer that stands still is known before the patience is over, the last look included.
class link_pulse {
 public:
  using time_point = std::chrono::steady_clock::time_point;
  using duration = std::chrono::steady_clock::duration;

  enum class advice { nothing, ask, ask_both_ways, link_is_silent, peer_is_silent };

  explicit link_pulse(std::chrono::milliseconds patience = std::chrono::milliseconds{1000}) noexcept
      : patience_{patience} {}

  /// Between two looks.
  [[nodiscard]] duration period() const noexcept { return patience_ / 10; }

  /// Nothing was in flight until now, or nothing can be concluded from the silence.
  void begin(time_point now) noexcept;
  /// A sign of life came over the link.
  void sign(time_point now) noexcept;
  /// The process that holds the other end has said something on another way.
  void word(time_point now) noexcept { word_ = now; }

  [[nodiscard]] advice look(time_point now) noexcept;
  [[nodiscard]] std::chrono::milliseconds silence(time_point now) const noexcept {
    return std::chrono::duration_cast<std::chrono::milliseconds>(now - heard_);
  }

 private:
  duration patience_;
  time_point heard_{};  ///< over the link
  time_point word_{};   ///< on another way
  time_point asked_{};
  time_point looked_{};
};

}  // namespace troupe::actors
