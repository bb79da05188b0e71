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

/// Virtual time, and what is going to happen: earliest first, in the order of planning where it is at
/// one moment.
class timeline {
 public:
  [[nodiscard]] moment now() const noexcept { return now_; }
  void at(moment when, std::function<void()> what) {
    planned_.push_back({std::max(when, now_), ++order_, std::move(what)});
    std::ranges::push_heap(planned_, later);
  }
  void after(microseconds time, std::function<void()> what) { at(now_ + time, std::move(what)); }
  /// False: nothing is planned any more.
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

  /// Not the clock's zero: nothing may depend on that.
  moment now_{std::chrono::hours{1}};
  std::uint64_t order_{0};
  std::vector<plan> planned_;
};

}  // namespace troupe::actors::cluster_simulation
