#pragma once

/// Reduces a run of a simulation that breaks an invariant to a smaller one that breaks the same.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace troupe::testing {

/// Things of one kind that a run can do without, one by one.
template <class Options>
struct dispensable {
  std::string name;  ///< "faults"
  std::size_t count{0};
  /// Returns false if that one was left out before.
  std::function<bool(Options&, std::size_t)> leave_out;

  [[nodiscard]] std::size_t left_in(Options of) const {
    std::size_t left = 0;
    for (auto i = count; i > 0; --i) left += leave_out(of, i - 1) ? 1 : 0;
    return left;
  }
};

template <class Options, class Report>
struct shrinkable {
  std::function<Report(const Options&)> run;
  /// The invariant that a violation is about, without the names and numbers of the run.
  std::function<std::string(const std::string&)> kind_of;
  /// Makes the options repeat exactly the run of the report, and returns what can be left out of it.
  std::function<std::vector<dispensable<Options>>(Options&, const Report&)> take_apart;
};

template <class Options, class Report>
struct shrunk {
  Options of;
  Report story;      ///< of that run
  std::string left;  ///< "2 faults, 3 nodes, 1 requests"
};

template <class Options, class Report>
class shrinker {
 public:
  using progress = std::function<void(const std::string&)>;

  shrinker(shrinkable<Options, Report> what, Options of, std::uint32_t tries, progress say)
      : what_{std::move(what)}, best_{std::move(of)}, tries_{tries}, say_{std::move(say)} {}

  shrunk<Options, Report> run() {
    auto first = what_.run(best_);
    kind_ = what_.kind_of(first.violation);
    if (first.violation.empty()) return {best_, std::move(first), {}};
    parts_ = what_.take_apart(best_, first);
    for (auto before = size() + 1; size() < before;) {
      before = size();
      for (const auto& part : parts_) leave_out(part);
    }
    return {best_, what_.run(best_), left()};
  }

 private:
  [[nodiscard]] std::size_t size() const {
    std::size_t all = 0;
    for (const auto& part : parts_) all += part.left_in(best_);
    return all;
  }

  [[nodiscard]] std::string left() const {
    std::string out;
    for (const auto& part : parts_) {
      out += (out.empty() ? "" : ", ") + std::to_string(part.left_in(best_)) + " " + part.name;
    }
    return out;
  }

  /// Tries without one half, then the other, then ever smaller parts.
  void leave_out(const dispensable<Options>& what) {
    for (auto part = std::max<std::size_t>(what.count / 2, 1); part > 0; part /= 2) {
      for (std::size_t begin = 0; begin < what.count; begin += part) {
        auto less = best_;
        bool any = false;
        for (auto i = begin; i < std::min(begin + part, what.count); ++i) {
          any = what.leave_out(less, i) || any;
        }
        if (any) attempt(std::move(less));
      }
    }
    say_(what.name + " tried; left are " + left());
  }

  void attempt(Options of) {
    const auto dice = of.seed;
    for (std::uint32_t i = 0; i <= tries_; ++i) {
      of.seed = i == 0 ? dice : i;
      if (what_.kind_of(what_.run(of).violation) != kind_) continue;
      best_ = std::move(of);
      return;
    }
  }

  const shrinkable<Options, Report> what_;
  Options best_;
  const std::uint32_t tries_;
  const progress say_;
  std::string kind_;
  std::vector<dispensable<Options>> parts_;
};

/// Leaves things out of a run for as long as the rest still breaks the same invariant. That changes
/// the random choices of the rest, so each attempt is also made with `tries` other dice. `say`
/// receives progress messages. If the run breaks nothing, `story` has no violation.
template <class Options, class Report>
[[nodiscard]] shrunk<Options, Report> shrink(
    const shrinkable<Options, Report>& what, const Options& of, std::uint32_t tries,
    const typename shrinker<Options, Report>::progress& say) {
  return shrinker<Options, Report>{what, of, tries, say}.run();
}

}  // namespace troupe::testing
