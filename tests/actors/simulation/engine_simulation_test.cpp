#include "engine_simulation.hpp"

#include <iostream>
#include <map>
#include <string>

#include <gtest/gtest.h>

#include "troupe/actors/logging.hpp"

#include "seeded_runs.hpp"

namespace troupe::actors::engine_simulation {
namespace {

constexpr std::uint64_t runs = 150;

class engines_under_virtual_time : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_TRUE(init_logging({.level = "off", .node = {}, .file = {}})); }
};

void add(report& sum, const report& one) {
  auto& all = sum.engines;
  const auto& its = one.engines;
  for (const auto& [mode, count] : its.moved) all.moved[mode] += count;
  for (const auto& [code, count] : its.reasons) all.reasons[code] += count;
  for (const auto& [what, count] : one.faults) sum.faults[what] += count;
  for (const auto& [what, count] : one.values) sum.values[what] += count;
  all.failed += its.failed;
  all.aborted += its.aborted;
  all.lapsed += its.lapsed;
  all.sources_done += its.sources_done;
  all.words += its.words;
  all.in_line += its.in_line;
  all.again += its.again;
  all.from_two += its.from_two;
  all.from_parts += its.from_parts;
  all.for_two += its.for_two;
  all.once_more += its.once_more;
  all.held_by_two += its.held_by_two;
  all.words_to_two += its.words_to_two;
  sum.events += one.events;
  sum.requests += one.requests;
  sum.rebuilt += one.rebuilt;
  sum.parked += one.parked;
  sum.refused += one.refused;
  sum.crashed += one.crashed;
}

TEST_F(engines_under_virtual_time, keep_every_invariant_while_everything_below_them_fails) {
  report sum;
  const auto wanted = troupe::testing::run_many(runs, run, [&](const report& r) { add(sum, r); });
  if (HasFailure()) return;
  auto& engines = sum.engines;
  std::cout << wanted << " runs: " << sum.events << " events, " << sum.requests << " requests, "
            << engines.moved[transfer_mode::write] << " written, "
            << engines.moved[transfer_mode::read] << " read, " << engines.sources_done
            << " sources done, " << engines.failed << " operations failed, " << engines.aborted
            << " aborted, " << engines.lapsed << " leases lapsed, " << engines.words << " words, "
            << engines.in_line << " in line, " << engines.again << " again, " << sum.parked
            << " seen parked, " << sum.rebuilt << " ends made again, " << sum.refused
            << " batches refused by a fence, " << sum.crashed
            << " sessions crashed; with several ranks: " << engines.from_two
            << " received from two, " << engines.from_parts << " of them from parts, "
            << engines.for_two << " sources done by two, " << engines.once_more
            << " of them after a failure, " << engines.held_by_two << " held for both, "
            << engines.words_to_two << " words to two\n";
  for (const auto& [code, count] : engines.reasons) {
    std::cout << "  failed: " << to_string(code) << " " << count << "\n";
  }
  for (const auto& [what, count] : sum.values) std::cout << "  " << what << " " << count << "\n";
  for (const auto& [what, count] : sum.faults) std::cout << "  " << what << " " << count << "\n";
  if (wanted < runs) return;
  // The runs must have met what they are for.
  EXPECT_GT(engines.moved[transfer_mode::write], wanted);
  EXPECT_GT(engines.moved[transfer_mode::read], wanted);
  EXPECT_GT(engines.sources_done, wanted);
  EXPECT_GT(engines.aborted, wanted);
  EXPECT_GT(engines.lapsed, 0U);
  EXPECT_GT(engines.words, wanted);
  EXPECT_GT(engines.again, 0U);
  EXPECT_GT(sum.parked, wanted);
  EXPECT_GT(sum.rebuilt, wanted);
  EXPECT_GT(sum.refused, 0U);
  EXPECT_GT(sum.crashed, wanted);
  EXPECT_GT(engines.from_two, wanted);
  EXPECT_GT(engines.from_parts, 0U);
  EXPECT_GT(engines.for_two, wanted);
  EXPECT_GT(engines.once_more, 0U);
  EXPECT_GT(engines.held_by_two, 0U);
  EXPECT_GT(engines.words_to_two, wanted);
  EXPECT_EQ(sum.faults.size(), 8U);
  for (const auto* what :
       {"put small done", "put large done", "put small failed", "put large failed",
        "get small done", "get large done", "get not found", "query done", "remove done"}) {
    EXPECT_GT(sum.values[what], wanted) << what;
  }
  for (const auto* what :
       {"put small unknown", "put large unknown", "get failed", "query failed", "remove failed",
        "no room", "put from a copy", "put from a view", "put from a block"}) {
    EXPECT_GT(sum.values[what], 0U) << what;
  }
}

TEST_F(engines_under_virtual_time, run_the_same_way_again_from_the_same_seed) {
  troupe::testing::expect_runs_follow_their_seed(run);
}

TEST_F(engines_under_virtual_time, are_cut_down_to_what_breaks_an_invariant) {
  options of;
  of.seed = 2;
  troupe::testing::expect_runs_shrink<options, report>(whole(), of, 3, [](const report& r) {
    return r.faults.contains("a process dies") && r.rebuilt > 0 && r.engines.aborted > 2;
  });
}

}  // namespace
}  // namespace troupe::actors::engine_simulation
