#pragma once

/// Runs of a simulation whose whole course follows from a seed. TROUPE_SEED=N repeats one run, with
/// all that happens in it. TROUPE_RUNS=N makes N of them.

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <string>

#include <gtest/gtest.h>

#include "seed.hpp"
#include "shrink.hpp"

namespace troupe::testing {

/// Makes the runs, `by_default` unless the environment says otherwise, and hands each report to
/// `take`. Fails with the first one that has a violation. Returns how many there were to be.
template <class Options, class Report, class Take>
std::uint64_t run_many(std::uint64_t by_default, Report (*run)(const Options&), Take&& take) {
  const bool one = std::getenv("TROUPE_SEED") != nullptr;
  const auto wanted = one ? 1 : number_from_environment("TROUPE_RUNS", by_default);
  for (std::uint64_t i = 0; i < wanted; ++i) {
    Options of;
    of.seed = one ? seed() : seed() * 1000 + i;
    of.traced = one;
    const auto report = run(of);
    EXPECT_EQ(report.violation, "") << "TROUPE_SEED=" << of.seed << " runs it again";
    if (!report.violation.empty()) break;
    take(report);
  }
  return wanted;
}

/// The same seed gives the same run, another seed another one.
template <class Options, class Report>
void expect_runs_follow_their_seed(Report (*run)(const Options&)) {
  Options of;
  of.seed = seed();
  const auto first = run(of), second = run(of);
  EXPECT_EQ(first.digest, second.digest);
  EXPECT_EQ(first.events, second.events);
  of.seed += 1;
  EXPECT_NE(run(of).digest, first.digest);
}

/// A run is repeated from its list of faults. One with a planted violation is cut down to `most`
/// faults and to less of everything else, and breaks the same invariant, the same way each time.
template <class Options, class Report>
void expect_runs_shrink(shrinkable<Options, Report> what, const Options& of, std::size_t most,
                        const std::function<bool(const Report&)>& breaks) {
  const auto whole = what.run(of);
  ASSERT_TRUE(breaks(whole)) << "choose another seed";
  auto again = of;
  const auto parts = what.take_apart(again, whole);
  EXPECT_EQ(what.run(again).digest, whole.digest);

  const auto planted = [&breaks, run = what.run](const Options& with) {
    auto r = run(with);
    r.violation = breaks(r) ? "planted: after " + std::to_string(r.events) + " events" : "";
    return r;
  };
  what.run = planted;
  const auto least = shrink<Options, Report>(what, of, 5, [](const std::string&) {});
  EXPECT_EQ(what.kind_of(least.story.violation), what.kind_of("planted: after 1 events"));
  EXPECT_LT(least.story.events, whole.events);
  EXPECT_GT(parts.front().left_in(again), most);
  for (const auto& part : parts) {
    EXPECT_LE(part.left_in(least.of), part.name == "faults" ? most : part.left_in(again))
        << part.name << "; left are " << least.left;
  }
  EXPECT_EQ(planted(least.of).violation, least.story.violation);
}

}  // namespace troupe::testing
