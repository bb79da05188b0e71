#pragma once

#include <cstdint>
#include <deque>
#include <set>
#include <utility>
#include <variant>
#include <vector>

#include "troupe/actors/messages/source_changes.hpp"

namespace troupe::actors {

/// The engine's calls for one send, in order, held back until the GPU that it computes on has
/// reached their points. Plain class, not thread-safe.
class compute_line {
 public:
  using word = std::variant<source_progress, source_sealed>;

  /// Adds a call that takes effect once the GPU reaches `point`; 0: once the earlier ones have
  /// taken effect.
  void add(word said, std::uint64_t point) { held_.push_back({std::move(said), point}); }
  /// May come before the `add` of its point.
  void reached(std::uint64_t point) { reached_.insert(point); }
  /// Removes and returns the calls that take effect now, in order.
  [[nodiscard]] std::vector<word> take() {
    std::vector<word> fit;
    while (!held_.empty() &&
           (held_.front().point == 0 || reached_.erase(held_.front().point) != 0)) {
      fit.push_back(std::move(held_.front().said));
      held_.pop_front();
    }
    return fit;
  }
  [[nodiscard]] bool empty() const noexcept { return held_.empty() && reached_.empty(); }

 private:
  struct held_word {
    word said;
    std::uint64_t point;
  };
  std::deque<held_word> held_;
  std::set<std::uint64_t> reached_;  ///< points of held calls, or of calls still to come
};

}  // namespace troupe::actors
