#include "link_simulation.hpp"

#include <iostream>
#include <map>
#include <set>
#include <string>

#include <gtest/gtest.h>

#include "troupe/actors/logging.hpp"

#include "seeded_runs.hpp"

namespace troupe::actors::link_simulation {
namespace {

constexpr std::uint64_t runs = 300;

class links_under_virtual_time : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_TRUE(init_logging({.level = "off", .node = {}, .file = {}})); }
};

TEST_F(links_under_virtual_time, keep_every_invariant_while_everything_below_them_fails) {
  report sum;
  const auto wanted = troupe::testing::run_many(runs, run, [&](const report& r) {
    sum.events += r.events;
    sum.links += r.links;
    sum.rebuilds += r.rebuilds;
    sum.moved += r.moved;
    sum.given_up += r.given_up;
    sum.refused += r.refused;
    for (const auto& [what, count] : r.faults) sum.faults[what] += count;
  });
  if (HasFailure()) return;
  std::cout << wanted << " runs: " << sum.events << " events, " << sum.links << " ends came up, "
            << sum.rebuilds << " were made again, " << sum.moved << " transfers moved, "
            << sum.given_up << " given up, " << sum.refused << " batches refused by a fence\n";
  for (const auto& [what, count] : sum.faults) std::cout << "  " << what << " " << count << "\n";
  if (wanted < runs) return;
  // The runs must have met what they are for.
  EXPECT_GT(sum.rebuilds, wanted);
  EXPECT_GT(sum.moved, 10 * wanted);
  EXPECT_GT(sum.given_up, wanted / 10);
  EXPECT_GT(sum.refused, 0U);
  EXPECT_EQ(sum.faults.size(), 8U);
}

TEST_F(links_under_virtual_time, run_the_same_way_again_from_the_same_seed) {
  troupe::testing::expect_runs_follow_their_seed(run);
}

TEST_F(links_under_virtual_time, are_cut_down_to_what_breaks_an_invariant) {
  troupe::testing::expect_runs_shrink<options, report>(whole(), {}, 3, [](const report& r) {
    // Eight transfers after the last fault are always made.
    return r.faults.contains("a process dies") && r.rebuilds > 2 && r.moved > 10;
  });
  EXPECT_EQ(kind_of("prefill-1: transfer 17 hears of no end"), "transfer N hears of no end");
  EXPECT_EQ(kind_of("at decode-0 are 2 links: 5, 6"), "at decode are N links");
}

}  // namespace
}  // namespace troupe::actors::link_simulation
