#include "link_simulation.hpp"

#include <cstdlib>
#include <iostream>
#include <map>
#include <set>
#include <string>

#include <gtest/gtest.h>

#include "troupe/actors/logging.hpp"

#include "seed.hpp"

// TROUPE_SEED=N repeats one run, with all that happens in it. TROUPE_RUNS=N makes N of them.
namespace troupe::actors::link_simulation {
namespace {

constexpr std::uint64_t runs = 300;

class links_under_virtual_time : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_TRUE(init_logging({.level = "off", .node = {}, .file = {}})); }
};

TEST_F(links_under_virtual_time, keep_every_invariant_while_everything_below_them_fails) {
  const bool one = std::getenv("TROUPE_SEED") != nullptr;
  const auto wanted = one ? 1 : troupe::testing::number_from_environment("TROUPE_RUNS", runs);
  report sum;
  for (std::uint64_t i = 0; i < wanted; ++i) {
    options of;
    of.seed = one ? troupe::testing::seed() : troupe::testing::seed() * 1000 + i;
    of.traced = one;
    const auto r = run(of);
    ASSERT_EQ(r.violation, "") << "TROUPE_SEED=" << of.seed << " runs it again";
    sum.events += r.events;
    sum.links += r.links;
    sum.rebuilds += r.rebuilds;
    sum.moved += r.moved;
    sum.given_up += r.given_up;
    sum.refused += r.refused;
    for (const auto& [what, count] : r.faults) sum.faults[what] += count;
  }
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
  options of;
  of.seed = troupe::testing::seed();
  const auto first = run(of), second = run(of);
  EXPECT_EQ(first.digest, second.digest);
  EXPECT_EQ(first.events, second.events);
  of.seed += 1;
  EXPECT_NE(run(of).digest, first.digest);
}

}  // namespace
}  // namespace troupe::actors::link_simulation
