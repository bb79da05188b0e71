#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <optional>
#include <set>
#include <string>
#include <utility>

namespace troupe::actors {

/// How fast member lists may be written to the network: 500,000 entries a second, which takes about
/// half of a processor, and at most 25,000 in one go, since no heartbeat is read meanwhile.
/// Clusters of up to 150 nodes never reach the limit. Clockless; not thread-safe.
class broadcast_budget {
 public:
  using time_point = std::chrono::steady_clock::time_point;

  /// Cost of one entry of one list.
  static constexpr std::chrono::microseconds an_entry{2};

  [[nodiscard]] bool has_room(time_point now) {
    if (last_ && now > *last_) {
      const std::chrono::duration<double> passed = now - *last_;
      room_ = std::min(at_once, room_ + passed.count() * per_second);
    }
    last_ = now;
    return room_ > 0;
  }
  /// Accounts for a list of so many entries that goes to one node.
  void tells(std::size_t entries) { room_ -= static_cast<double>(entries); }

 private:
  static constexpr double per_second = static_cast<double>(std::chrono::seconds{1} / an_entry);
  static constexpr double at_once = 25'000;

  double room_{at_once};
  std::optional<time_point> last_;
};

/// Takes the next name after `told_last`, round robin: another list for all must not start over
/// with the nodes that the last one has reached. `waiting` must not be empty.
[[nodiscard]] inline std::string take_next(std::set<std::string>& waiting,
                                           const std::string& told_last) {
  auto next = waiting.upper_bound(told_last);
  if (next == waiting.end()) next = waiting.begin();
  return std::move(waiting.extract(next).value());
}

}  // namespace troupe::actors
