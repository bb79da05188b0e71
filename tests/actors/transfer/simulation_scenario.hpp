#pragma once

/// What a seed determines before a run begins: the geometry, the engines' actions, the faults, and
/// their times.

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "troupe/actors/messages/session_messages.hpp"

#include "session_simulation.hpp"

namespace troupe::actors::simulation {

inline constexpr std::uint32_t most_layers = 5;
inline constexpr std::uint32_t most_tokens = 12;

class dice {
 public:
  explicit dice(std::uint64_t seed) : state_{seed * 0x9E3779B97F4A7C15u + 0x1234567u} {}
  std::uint64_t next() {
    auto z = (state_ += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30u)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27u)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31u);
  }
  /// A number in [0, most].
  std::uint32_t upto(std::uint32_t most) {
    return static_cast<std::uint32_t>(next() % (most + 1ull));
  }
  bool one_in(std::uint32_t n) { return next() % n == 0; }
  friend bool operator==(const dice&, const dice&) = default;

 private:
  std::uint64_t state_;
};

enum side : std::uint8_t { decode = 0, prefill = 1 };
inline side other(side s) {
  return s == decode ? prefill : decode;
}

// -- time

enum class kind : std::uint8_t {
  start,
  frame,
  source_ready,
  seal,
  land,
  ghost,
  notice,
  complete,
  fence_effective,
  quiescent,
  whole,
  engine_abort,
  link_breaks,
  link_told,
  link_swaps,
  end_breaks,
  link_back,
  expire
};
inline constexpr std::array<const char*, 18> kind_names{
    "start",       "frame",     "source_ready",    "seal",       "land",      "ghost",
    "notice",      "complete",  "fence_effective", "quiescent",  "whole",     "engine_abort",
    "link_breaks", "link_told", "link_swaps",      "end_breaks", "link_back", "expire"};

struct event {
  std::uint32_t time;
  std::uint32_t order;
  kind what;
  side where;
  std::uint32_t index;  ///< of a frame, chunk, batch or link
  friend bool operator<(const event& a, const event& b) {
    return std::pair{a.time, a.order} > std::pair{b.time, b.order};
  }
};

/// Planned events, earliest first; events of one time run in the order of scheduling.
class timeline {
 public:
  void schedule(std::uint32_t time, kind what, side where, std::uint32_t index);
  [[nodiscard]] bool empty() const noexcept { return queue_.empty(); }
  event take();

 private:
  std::uint32_t order_{0};
  std::vector<event> queue_;
};

// -- the scenario

/// Layers that the prefill engine has computed up to a token.
struct chunk {
  std::uint32_t layer_begin, layer_end, token_end;
};

struct scenario {
  std::uint32_t layers{1}, tokens{0}, prefix{0}, source_tokens{0}, seal_tokens{0};
  std::uint32_t layers_per_batch{0}, max_in_flight{1}, latency{1};
  transfer_mode mode{transfer_mode::write};
  bool has_state{false}, sync_fence{false}, slow_fence{false};
  std::vector<std::byte> aux, expect;
  std::vector<chunk> chunks;
  std::array<std::uint32_t, 2> deadlines{1'000'000, 1'000'000};
  std::uint32_t faults{0};
  std::uint32_t refuse_post{0};  ///< number of the post that is refused; 0 for none

  [[nodiscard]] bool has(std::uint32_t of) const noexcept { return (faults & of) != 0; }
  [[nodiscard]] bool empty() const noexcept { return prefix == tokens; }
};

[[nodiscard]] scenario draw(dice& d, timeline& into);

}  // namespace troupe::actors::simulation
