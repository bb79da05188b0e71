#pragma once

#include <cstdint>
#include <deque>
#include <set>
#include <utility>
#include <variant>
#include <vector>

#include "troupe/actors/messages/source_changes.hpp"

namespace troupe::actors {

/// What an engine said of one send, in its order, held back until the GPU that it computes on has
/// come that far. Plain class, not thread-safe.
class compute_line {
 public:
  using word = std::variant<source_progress, source_sealed>;

  /// Said now, and true once the GPU has come to `point`; 0: true once what was said before is.
  void add(word said, std::uint64_t point) { held_.push_back({std::move(said), point}); }
  /// May be heard before what was said with it.
  void reached(std::uint64_t point) { reached_.insert(point); }
  /// What is true by now, in order.
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
  std::set<std::uint64_t> reached_;  ///< of what is held, or not said yet
};

}  // namespace troupe::actors
