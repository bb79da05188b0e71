#include "session_simulation.hpp"

#include <array>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <map>
#include <string>

#include <gtest/gtest.h>

#include "sanitized.hpp"
#include "seed.hpp"

namespace troupe::actors::simulation {
namespace {

/// TROUPE_SEED=n runs that one seed and prints its trace; TROUPE_RUNS=n sets the number of runs.
std::uint64_t from_environment(const char* name, std::uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

TEST(session_simulation, one_seed_runs_the_same_way_twice) {
  for (std::uint64_t seed = 1; seed < 200; ++seed) {
    std::string first;
    std::string second;
    static_cast<void>(run(seed, &first));
    static_cast<void>(run(seed, &second));
    ASSERT_EQ(first, second) << "seed " << seed;
  }
}

TEST(session_simulation, no_order_of_events_and_no_fault_breaks_an_invariant_of_a_transfer) {
  if (std::getenv("TROUPE_SEED") != nullptr) {
    const auto seed = from_environment("TROUPE_SEED", 0);
    std::string trace;
    const auto r = run(seed, &trace);
    std::cout << trace << describe_faults(r.faults) << "\n";
    ASSERT_EQ(r.violation, "") << "seed " << seed;
    return;
  }
  const auto runs = from_environment("TROUPE_RUNS", troupe::testing::tries(200'000));
  // Each commit starts at another seed, which adds coverage; the seed of a failure is printed.
  const auto first = troupe::testing::seed() * 1'000'000;
  std::uint64_t done = 0;
  std::uint64_t events = 0;
  std::map<errc, std::uint64_t> failures;
  std::map<transfer_mode, std::uint64_t> done_though_shut_out;
  for (auto seed = first; seed < first + runs; ++seed) {
    const auto r = run(seed);
    if (!r.violation.empty()) {
      std::string trace;
      static_cast<void>(run(seed, &trace));
      FAIL() << r.violation << "\nseed " << seed << " (" << describe_faults(r.faults)
             << "); TROUPE_SEED=" << seed << " runs it again\n"
             << trace;
    }
    done += r.decode_done ? 1 : 0;
    events += r.events;
    if (r.shut_out && r.decode_done) ++done_though_shut_out[*r.shut_out];
    if (r.decode_failure) ++failures[*r.decode_failure];
  }
  std::cout << "seeds " << first << " to " << first + runs - 1 << ": " << events << " events, "
            << done << " transfers done";
  for (const auto& [code, count] : failures) std::cout << ", " << to_string(code) << " " << count;
  std::cout << ", done though shut out by an end that broke first: read "
            << done_though_shut_out[transfer_mode::read] << ", write "
            << done_though_shut_out[transfer_mode::write] << "\n";
  // A simulation that only ever fails, or never fails, proves nothing.
  if (runs < 10'000) return;
  EXPECT_GT(done, runs / 3);
  for (const auto code :
       {errc::aborted, errc::deadline, errc::peer_lost, errc::link_broken, errc::overloaded,
        errc::out_of_range, errc::invalid_config, errc::layout_mismatch}) {
    EXPECT_GT(failures[code], runs / 5000) << to_string(code);
  }
  EXPECT_GT(done_though_shut_out[transfer_mode::read], runs / 20'000);
  EXPECT_GT(done_though_shut_out[transfer_mode::write], runs / 20'000);
}

}  // namespace
}  // namespace troupe::actors::simulation
