#include <chrono>
#include <cstdlib>
#include <iostream>
#include <map>
#include <string>

#include <gtest/gtest.h>

#include "cluster_simulation/simulation.hpp"

// TROUPE_SEED=N TROUPE_NODES=N TROUPE_REQUESTS=N run one of them again, or a larger one.
namespace troupe::actors::cluster_simulation {
namespace {

std::uint64_t from_environment(const char* name, std::uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

std::uint64_t seed_of_the_day() {
  const auto days = std::chrono::duration_cast<std::chrono::hours>(
                        std::chrono::system_clock::now().time_since_epoch())
                        .count() /
                    24;
  return static_cast<std::uint64_t>(days) * 1000;
}

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

/// The same again with its last lines, for whoever has to find out why.
void expect_no_violation(options of, const report& r) {
  if (r.violation.empty()) return;
  of.traced = true;
  const auto again = run(of);
  ADD_FAILURE() << r.violation << " after " << r.events << " events\nTROUPE_SEED=" << of.seed
                << " TROUPE_NODES=" << of.prefills + of.decodes
                << " TROUPE_REQUESTS=" << of.requests << " runs it again; its last lines:\n"
                << again.trace;
  EXPECT_EQ(again.violation, r.violation) << "and that run went another way";
}

}  // namespace

TEST(cluster_simulation, small_clusters_where_everything_goes_wrong_keep_every_invariant) {
  const auto first = from_environment("TROUPE_SEED", seed_of_the_day());
  const auto runs = std::getenv("TROUPE_SEED") != nullptr ? 1 : from_environment("TROUPE_RUNS", 40);
  std::map<std::string, std::uint64_t> faults;
  std::uint64_t done = 0;
  std::uint64_t refused = 0;
  std::uint64_t rebuilds = 0;
  std::uint64_t once_more = 0;
  for (auto seed = first; seed < first + runs; ++seed) {
    const auto of = small(seed);
    const auto r = run(of);
    if (runs == 1) print(of, r);
    expect_no_violation(of, r);
    if (HasFailure()) return;
    for (const auto& [what, count] : r.faults) faults[what] += count;
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
  // A simulation in which nothing goes wrong, or nothing well, proves nothing.
  EXPECT_EQ(faults.size(), 16U);
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

TEST(cluster_simulation, a_thousand_nodes_and_a_hundred_thousand_requests) {
  options of;
  of.seed = from_environment("TROUPE_SEED", seed_of_the_day());
  const auto nodes = static_cast<std::uint32_t>(from_environment("TROUPE_NODES", 1000));
  of.prefills = nodes / 2;
  of.decodes = nodes - nodes / 2;
  of.requests = static_cast<std::uint32_t>(from_environment("TROUPE_REQUESTS", 100'000));
  of.requests_per_second = 1000;
  of.faults_per_second = 5;
  const auto r = run(of);
  print(of, r);
  expect_no_violation(of, r);
  EXPECT_EQ(r.done + r.failed, of.requests);
  // The supervisor is away or stands still for some of the time, and nobody waits longer than 2 s.
  EXPECT_GT(r.done, of.requests * 8 / 10);
}

}  // namespace troupe::actors::cluster_simulation
