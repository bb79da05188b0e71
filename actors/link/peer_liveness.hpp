#pragma once

/// Judges whether a peer is alive from the times of its last signs of life. A plain state machine:
/// time is passed in. No CAF here.

#include <chrono>

namespace troupe::actors {

/// Serves one link while something is in flight on it. The link's owner calls `look` every `period`
/// and follows its advice. Silence is counted from the last sign of life that came over the link. A
/// long gap between looks restarts the count, because this process itself stood still.
///
///   silence, in parts of the patience   what to do
///   ----------------------------------  ----------
///   less than 1/4                       `nothing`
///   from 1/4                            `ask` over the link, again after each quarter
///   from 1/2                            `ask_both_ways`: also the process that holds the other end
///   from 3/4, the process has answered  `link_is_silent`: the peer lives, the link does not
///   from 3/4, the process is silent     `peer_is_silent`: the peer stands still, or is cut off
///
/// A peer that stands still is thus detected before the patience is over, the last look included.
class peer_liveness {
 public:
  using time_point = std::chrono::steady_clock::time_point;
  using duration = std::chrono::steady_clock::duration;

  enum class advice { nothing, ask, ask_both_ways, link_is_silent, peer_is_silent };

  explicit peer_liveness(
      std::chrono::milliseconds patience = std::chrono::milliseconds{1000}) noexcept
      : patience_{patience} {}

  /// The interval between two looks.
  [[nodiscard]] duration period() const noexcept { return patience_ / 10; }

  /// Restarts the count: nothing was in flight until now, or the silence proves nothing.
  void begin(time_point now) noexcept;
  /// A sign of life came over the link.
  void sign(time_point now) noexcept;
  /// A sign of life of the process that holds the other end came by another way than the link.
  void word(time_point now) noexcept { word_ = now; }

  [[nodiscard]] advice look(time_point now) noexcept;
  [[nodiscard]] std::chrono::milliseconds silence(time_point now) const noexcept {
    return std::chrono::duration_cast<std::chrono::milliseconds>(now - heard_);
  }

 private:
  duration patience_;
  time_point heard_{};  ///< last sign of life over the link
  time_point word_{};   ///< last sign of life by another way
  time_point asked_{};
  time_point looked_{};
};

}  // namespace troupe::actors
