#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <vector>

#include "world.hpp"

namespace troupe::actors::cluster_simulation {

enum side : std::uint8_t { decode = 0, prefill = 1 };
inline constexpr side other(side s) {
  return s == decode ? prefill : decode;
}

/// A link between a prefill node's life and a decode node's: frames in order, and bytes that a NIC
/// moves by itself. It breaks once, for both, and each end finds out at a time of its own.
class link : public std::enable_shared_from_this<link> {
 public:
  link(world& in, life at_decode, life at_prefill, stage_of_things placed);

  [[nodiscard]] const life& at(side s) const { return ends_[s]; }
  [[nodiscard]] const life& peer_of(const node_life& one) const {
    return &one == ends_[decode].get() ? ends_[prefill] : ends_[decode];
  }
  [[nodiscard]] stage_of_things placed() const noexcept { return placed_; }
  [[nodiscard]] bool seen_broken(side s) const { return seen_[s]; }
  /// Whether bytes get through: a short while longer than frames.
  [[nodiscard]] bool moves_bytes() const;

  void attach(side s, const std::shared_ptr<transfer>& who) { attached_[s].insert(who); }
  void detach(side s, const std::shared_ptr<transfer>& who) { attached_[s].erase(who); }

  /// A frame of `from`; lost where the link breaks before it comes.
  void send(side from, std::function<void()> what);
  /// The cable, a process or a queue pair: each end sees it within that time.
  void breaks(microseconds seen_within);
  /// The membership says to this end that its peer is gone.
  void left_by_peer(const life& at);

 private:
  void see(side s, const error& why);

  world& world_;
  std::array<life, 2> ends_;
  const stage_of_things placed_;
  std::array<moment, 2> last_{};
  std::array<bool, 2> seen_{};
  bool broken_{false};
  moment bytes_until_{};
  struct by_number {
    bool operator()(const std::shared_ptr<transfer>& a, const std::shared_ptr<transfer>& b) const;
  };
  std::array<std::set<std::shared_ptr<transfer>, by_number>, 2> attached_;
};

}  // namespace troupe::actors::cluster_simulation
