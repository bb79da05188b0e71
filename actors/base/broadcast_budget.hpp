#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <optional>
#include <set>
#include <string>
#include <utility>

namespace troupe::actors {

/// How fast lists of members may be written to the network: 500,000 of their entries a second, which
/// is about half of a processor, and no more than 25,000 at once, since meanwhile no heartbeat is
/// read. Clusters of up to 150 nodes never come near it. Clockless; not thread-safe.
class broadcast_budget {
 public:
  using time_point = std::chrono::steady_clock::time_point;

  /// What one entry of one list takes.
  static constexpr std::chrono::microseconds an_entry{2};

  [[nodiscard]] bool may_tell(time_point now) {
    if (last_ && now > *last_) {
      const std::chrono::duration<double> passed = now - *last_;
      room_ = std::min(at_once, room_ + passed.count() * per_second);
    }
    last_ = now;
    return room_ > 0;
  }
  /// A list of so many entries goes to one node.
  void tells(std::size_t entries) { room_ -= static_cast<double>(entries); }

 private:
  static constexpr double per_second = static_cast<double>(std::chrono::seconds{1} / an_entry);
  static constexpr double at_once = 25'000;

  double room_{at_once};
  std::optional<time_point> last_;
};

/// Takes the one whose turn it is: the next behind the one that was told last, all of them round.
/// Another list for everybody must not start over with those whom the last one has reached. Not of none.
[[nodiscard]] inline std::string take_next(std::set<std::string>& waiting,
                                           const std::string& told_last) {
  auto next = waiting.upper_bound(told_last);
  if (next == waiting.end()) next = waiting.begin();
  return std::move(waiting.extract(next).value());
}

}  // namespace troupe::actors
