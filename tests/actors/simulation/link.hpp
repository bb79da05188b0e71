#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "world.hpp"

namespace troupe::actors::cluster_simulation {

enum side : std::uint8_t { decode = 0, prefill = 1 };
inline constexpr side other(side s) {
  return s == decode ? prefill : decode;
}

/// A link between one life of a prefill node and one of a decode node: ordered frames, and bytes
/// that a NIC moves by itself. It ends once, for both ends, and each end notices at its own time.
/// Before that it may break and be rebuilt: each end sees the break at its own time, and learns of
/// the next generation when it is told or receives something over it. Frames in flight at a break
/// are lost.
class link : public std::enable_shared_from_this<link> {
 public:
  link(world& in, life at_decode, life at_prefill, stage_of_things placed);

  [[nodiscard]] const life& at(side s) const { return ends_[s]; }
  [[nodiscard]] const life& peer_of(const node_life& one) const {
    return &one == ends_[decode].get() ? ends_[prefill] : ends_[decode];
  }
  [[nodiscard]] stage_of_things placed() const noexcept { return placed_; }
  [[nodiscard]] bool seen_broken(side s) const { return seen_[s]; }
  /// The generation of the link that this end uses. Empty while this end sees it broken.
  [[nodiscard]] std::optional<std::uint32_t> present(side s) const {
    return seen_[s] || gap_[s] ? std::nullopt : std::optional{knows_[s]};
  }
  /// Whether bytes of a batch posted over that generation still get through, which they do for a
  /// short while longer than frames.
  [[nodiscard]] bool moves_bytes(std::uint32_t generation) const;

  /// Whether the link has broken, but not for good.
  [[nodiscard]] bool is_made_again() const {
    return !broken_ && (knows_[decode] != generation_ || knows_[prefill] != generation_);
  }

  void attach(side s, const std::shared_ptr<transfer>& who) { attached_[s].insert(who); }
  void detach(side s, const std::shared_ptr<transfer>& who) { attached_[s].erase(who); }

  /// Sends a frame from that end. It is lost if the link breaks before it arrives.
  void send(side from, std::function<void()> what);
  /// A cable, process or queue pair fails. Each end notices within that time.
  void breaks(microseconds seen_within);
  /// The lanes break and are rebuilt.
  void breaks_and_returns();
  /// This end learns from the membership that its peer is gone.
  void remember(side s, const std::shared_ptr<transfer>& who);
  /// The membership says to this end that its peer is gone.
  void left_by_peer(const life& at);
  void take_apart() {
    for (auto& words : words_) words.clear();
    for (auto& who : attached_) who.clear();
  }

 private:
  static constexpr std::size_t most_words = 64;

  void see(side s, const error& why);
  void see_break(side s, std::uint32_t next);
  void come_back(side s, std::uint32_t next);
  [[nodiscard]] bool arrives(side to, std::uint32_t generation);

  world& world_;
  std::array<life, 2> ends_;
  const stage_of_things placed_;
  std::array<moment, 2> last_{};
  std::array<bool, 2> seen_{};
  bool broken_{false};
  moment bytes_until_{};
  std::uint32_t generation_{0};
  std::array<std::uint32_t, 2> knows_{};
  std::array<bool, 2> gap_{};
  moment former_until_{};
  std::array<std::deque<std::shared_ptr<transfer>>, 2> words_;
  struct by_number {
    bool operator()(const std::shared_ptr<transfer>& a, const std::shared_ptr<transfer>& b) const;
  };
  std::array<std::set<std::shared_ptr<transfer>, by_number>, 2> attached_;
};

}  // namespace troupe::actors::cluster_simulation
