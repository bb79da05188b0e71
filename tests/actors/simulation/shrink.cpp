#include "shrink.hpp"

#include <algorithm>
#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

namespace troupe::actors::cluster_simulation {

namespace {

class shrinker {
 public:
  shrinker(options of, std::uint32_t tries, const std::function<void(const std::string&)>& say)
      : best_{std::move(of)}, tries_{tries}, say_{say} {}

  shrunk run() {
    auto first = cluster_simulation::run(best_);
    kind_ = kind_of(first.violation);
    if (first.violation.empty()) return {best_, std::move(first)};
    // Replay the run from its list of faults, so that single faults can be left out.
    best_.faults = first.drawn_faults;
    best_.at_most = first.virtual_time + std::chrono::seconds{10};
    for (auto before = size() + 1; size() < before;) {
      before = size();
      leave_out("faults", best_.faults->size(), [](options& from, std::size_t i) {
        return std::exchange((*from.faults)[i].happens, false);
      });
      leave_out("nodes", best_.prefills + best_.decodes, [](options& from, std::size_t i) {
        return from.absent_nodes.insert(static_cast<std::uint32_t>(i)).second;
      });
      leave_out("requests", best_.requests, [](options& from, std::size_t i) {
        return from.unasked_requests.insert(static_cast<std::uint32_t>(i)).second;
      });
    }
    best_.traced = true;
    return {best_, cluster_simulation::run(best_)};
  }

 private:
  using leave_out_fn = bool (*)(options&, std::size_t);

  [[nodiscard]] std::size_t size() const {
    return static_cast<std::size_t>(
               std::ranges::count(*best_.faults, true, &drawn_fault::happens)) +
           best_.prefills + best_.decodes - best_.absent_nodes.size() + best_.requests -
           best_.unasked_requests.size();
  }

  /// Tries without one half, then the other, then ever smaller parts.
  void leave_out(const std::string& what, std::size_t count, leave_out_fn without) {
    for (auto part = std::max<std::size_t>(count / 2, 1); part > 0; part /= 2) {
      for (std::size_t begin = 0; begin < count; begin += part) {
        auto less = best_;
        bool any = false;
        for (auto i = begin; i < std::min(begin + part, count); ++i) any = without(less, i) || any;
        if (any) attempt(std::move(less));
      }
    }
    say_(what + " tried; " + std::to_string(size()) + " faults, nodes and requests are left");
  }

  void attempt(options of) {
    const auto dice = of.seed;
    for (std::uint32_t i = 0; i <= tries_; ++i) {
      of.seed = i == 0 ? dice : i;
      if (kind_of(cluster_simulation::run(of).violation) != kind_) continue;
      best_ = std::move(of);
      return;
    }
  }

  options best_;
  const std::uint32_t tries_;
  const std::function<void(const std::string&)>& say_;
  std::string kind_;
};

}  // namespace

shrunk shrink(const options& of, std::uint32_t tries,
              const std::function<void(const std::string&)>& say) {
  return shrinker{of, tries, say}.run();
}

}  // namespace troupe::actors::cluster_simulation
