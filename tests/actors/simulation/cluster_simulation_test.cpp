#include <cstdlib>
#include <iostream>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "seed.hpp"
#include "seeded_runs.hpp"
#include "simulation.hpp"

// TROUPE_SEED=N TROUPE_NODES=N TROUPE_REQUESTS=N repeat one of the runs, or run a larger one.
namespace troupe::actors::cluster_simulation {
namespace {

void print(const options& of, const report& r) {
  std::cout << "seed " << of.seed << ": " << of.prefills + of.decodes << " nodes, " << r.done
            << " requests done and " << r.failed << " failed in " << r.attempts << " attempts, "
            << r.events << " events in " << r.virtual_time.count() / 1'000'000 << " s, epoch "
            << r.epochs << ", " << r.placed_once_more << " placed once more, " << r.lapses
            << " holds over, " << r.rebuilds << " links made again, " << r.refused_late
            << " batches refused by a fence\n  faults:";
  for (const auto& [what, count] : r.faults) std::cout << " " << what << " " << count << ",";
  std::cout << "\n  attempts failed:";
  for (const auto& [why, count] : r.reasons) std::cout << " " << to_string(why) << " " << count;
  std::cout << std::endl;
}

/// Repeats a failed run with a trace, and prints its last lines.
void expect_no_violation(options of, const report& r) {
  if (r.violation.empty()) return;
  of.traced = true;
  const auto again = run(of);
  ADD_FAILURE() << r.violation << " after " << r.events << " events\nTROUPE_SEED=" << of.seed
                << " TROUPE_NODES=" << of.prefills + of.decodes
                << " TROUPE_REQUESTS=" << of.requests << " runs it again (" << of.faults_per_second
                << " faults per second); its last lines:\n"
                << again.trace;
  EXPECT_EQ(again.violation, r.violation) << "and that run went another way";
}

/// Seeds that once broke an invariant.
constexpr std::uint64_t broke_once[]{
    68,     965,   1417,  1525,  1810,  1946,  2730,  3117,  3297,  3638,  3886,  4085,  4290,
    4298,   4340,  4466,  4475,  4660,  4933,  5166,  5323,  5518,  5571,  5623,  5698,  5822,
    5900,   6070,  6159,  6289,  6515,  6550,  6955,  7006,  7107,  7232,  7263,  7276,  7438,
    7560,   7793,  7895,  8011,  8110,  8240,  8448,  8623,  8695,  8707,  9137,  9355,  9847,
    10006,  10109, 10495, 10555, 10698, 11456, 11514, 11727, 11757, 11804, 11992, 12118, 12235,
    12755,  13045, 13049, 13420, 13431, 13474, 13590, 13630, 13724, 13757, 13814, 14055, 14090,
    14198,  14206, 14419, 14475, 14755, 14824, 15127, 15134, 15242, 16021, 16232, 16607, 16743,
    16850,  16934, 17157, 17326, 17503, 18118, 18367, 18458, 18896, 19474, 19575, 19676, 19798,
    19865,  20109, 20290, 20554, 20955, 21038, 21250, 21256, 21535, 21610, 22231, 22448, 22931,
    22985,  23075, 23420, 23795, 23880, 23953, 24208, 24339, 24441, 24938, 25102, 25380, 25682,
    25695,  25729, 25906, 26620, 26733, 27142, 27151, 27345, 27651, 27839, 27856, 28188, 28326,
    28501,  28780, 29116, 29120, 29252, 29777, 30115, 30131, 30472, 30475, 30548, 30799, 30828,
    30876,  30986, 31338, 31470, 31485, 31658, 32415, 32474, 32515, 32518, 32760, 32795, 32819,
    32860,  32953, 33385, 33415, 33471, 33630, 33730, 33820, 33930, 33935, 34555, 34662, 34709,
    35002,  35154, 35427, 35525, 35565, 35896, 36603, 36610, 36673, 36807, 37051, 37120, 37347,
    37369,  37726, 37830, 38006, 38010, 38391, 38555, 38725, 38736, 38998, 39035, 39311, 39755,
    103656, 8819,  14939, 24594, 16975, 43834,
};

/// Seeds that did so with the faults three times as frequent, and some that break an invariant
/// again if a fix is reverted.
constexpr std::uint64_t broke_once_with_many_faults[]{105017, 13605, 2502, 3593, 3909, 8874, 14938};

/// The seed that the environment names. By default all seeds that ever broke an invariant, and some
/// that are drawn for this commit.
std::vector<options> clusters_to_run() {
  if (std::getenv("TROUPE_SEED") != nullptr) return {small(troupe::testing::seed())};
  std::vector<options> all;
  for (const auto seed : broke_once) all.push_back(small(seed));
  for (const auto seed : broke_once_with_many_faults) {
    all.push_back(small(seed));
    all.back().faults_per_second *= 3;
  }
  for (std::uint64_t i = 0; i < troupe::testing::number_from_environment("TROUPE_RUNS", 40); ++i)
    all.push_back(small(1'000'000 + troupe::testing::seed() * 1000 + i));
  return all;
}

}  // namespace

TEST(cluster_simulation, small_clusters_where_everything_goes_wrong_keep_every_invariant) {
  const auto clusters = clusters_to_run();
  const auto runs = clusters.size();
  std::set<std::string> met;
  std::map<std::string, std::uint64_t> faults;
  std::uint64_t done = 0;
  std::uint64_t refused = 0;
  std::uint64_t rebuilds = 0;
  std::uint64_t once_more = 0;
  for (const auto& of : clusters) {
    const auto r = run(of);
    if (runs == 1) print(of, r);
    expect_no_violation(of, r);
    if (HasFailure()) return;
    for (const auto& [what, count] : r.faults) faults[what] += count;
    met.insert(r.met.begin(), r.met.end());
    done += r.done;
    refused += r.refused_late;
    rebuilds += r.rebuilds;
    once_more += r.placed_once_more;
  }
  std::cout << runs << " clusters: " << done << " requests done, " << once_more
            << " placed once more, " << rebuilds << " links made again, " << refused
            << " batches refused by a fence, faults:";
  for (const auto& [what, count] : faults) std::cout << " " << what << " " << count << ",";
  std::cout << "\n";
  if (runs < 20) return;
  // A simulation in which nothing fails, or nothing succeeds, proves nothing.
  EXPECT_EQ(faults.size(), 16U);
  EXPECT_EQ(met.size(), 14U) << "seven faults of a node, of a prefill and of a decode node";
  EXPECT_GT(done, runs * 300);
  EXPECT_GT(refused, 0U);
  EXPECT_GT(rebuilds, 0U);
  EXPECT_GT(once_more, 0U);
}

TEST(cluster_simulation, a_seed_runs_the_same_way_again) {
  const auto of = small(7);
  const auto once = run(of);
  const auto again = run(of);
  EXPECT_EQ(once.digest, again.digest);
  EXPECT_EQ(once.events, again.events);
  EXPECT_NE(once.digest, run(small(8)).digest);
}

TEST(cluster_simulation, a_run_is_cut_down_to_what_breaks_an_invariant) {
  troupe::testing::expect_runs_shrink<options, report>(whole(), small(3), 3, [](const report& r) {
    return r.faults.contains("node killed") && r.lapses > 0 && r.done > 2;
  });
}

TEST(cluster_simulation, a_thousand_nodes_and_a_hundred_thousand_requests) {
  // TROUPE_SEED runs another one: how many requests succeed depends on when the supervisor is
  // killed.
  auto of = large(troupe::testing::number_from_environment("TROUPE_SEED", 1));
  const auto nodes =
      static_cast<std::uint32_t>(troupe::testing::number_from_environment("TROUPE_NODES", 1000));
  of.prefills = nodes / 2;
  of.decodes = nodes - nodes / 2;
  of.requests = static_cast<std::uint32_t>(
      troupe::testing::number_from_environment("TROUPE_REQUESTS", 100'000));
  const auto r = run(of);
  print(of, r);
  expect_no_violation(of, r);
  EXPECT_EQ(r.done + r.failed, of.requests);
  // The supervisor is away or frozen for some of the time, and no request waits longer than 2 s.
  EXPECT_GT(r.done, of.requests * 8 / 10);
}

}  // namespace troupe::actors::cluster_simulation
