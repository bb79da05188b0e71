#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace troupe::actors::cluster_simulation {

using moment = std::chrono::steady_clock::time_point;
using std::chrono::microseconds;
using std::chrono::milliseconds;

/// Virtual time and the events planned for it: earliest first; events of one moment run in the
/// order of planning.
class timeline {
 public:
  [[nodiscard]] moment now() const noexcept { return now_; }
  void at(moment when, std::function<void()> what) {
    planned_.push_back({std::max(when, now_), ++order_, std::move(what)});
    std::ranges::push_heap(planned_, later);
  }
  void after(microseconds time, std::function<void()> what) { at(now_ + time, std::move(what)); }
  /// Runs the next event. Returns false if none is left.
  bool step() {
    if (planned_.empty()) return false;
    std::ranges::pop_heap(planned_, later);
    auto next = std::move(planned_.back());
    planned_.pop_back();
    now_ = next.when;
    next.what();
    return true;
  }

 private:
  struct plan {
    moment when;
    std::uint64_t order;
    std::function<void()> what;
  };
  static bool later(const plan& a, const plan& b) {
    return std::pair{a.when, a.order} > std::pair{b.when, b.order};
  }

  /// Not zero: nothing may depend on where the clock starts.
  moment now_{std::chrono::hours{1}};
  std::uint64_t order_{0};
  std::vector<plan> planned_;
};

}  // namespace troupe::actors::cluster_simulation
