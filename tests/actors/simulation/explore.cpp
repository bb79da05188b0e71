// `tests/run simulation --seeds A..B` and `--shrink SEED`: looks for runs that break an invariant,
// and for the smallest run that still breaks the same one.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <iostream>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <CLI/CLI.hpp>
#include <malloc.h>

#include "shrink.hpp"
#include "simulation.hpp"

namespace troupe::actors::cluster_simulation {
namespace {

struct range {
  std::uint64_t first{0}, last{0};  ///< both included
};

range range_of(const std::string& text) {
  const auto dots = text.find("..");
  const auto number = [&](const std::string& part) {
    if (part.empty() || part.find_first_not_of("0123456789") != std::string::npos ||
        part.size() > 19) {
      throw CLI::ValidationError{"--seeds", "found `" + text + "`, expected A..B, as in 1..1000"};
    }
    return std::stoull(part);
  };
  if (dots == std::string::npos) return {number(text), number(text)};
  const range out{number(text.substr(0, dots)), number(text.substr(dots + 2))};
  if (out.last < out.first) {
    throw CLI::ValidationError{"--seeds", "found `" + text + "`, which ends before it begins"};
  }
  return out;
}

struct wish {
  bool large{false};
  double fault_factor{1};
  std::uint32_t jobs{0};

  [[nodiscard]] options of(std::uint64_t seed) const {
    auto out = large ? cluster_simulation::large(seed) : small(seed);
    out.faults_per_second *= fault_factor;
    return out;
  }
};

/// The results of many runs, collected by several threads.
struct findings {
  std::mutex guard;
  std::uint64_t runs{0}, done{0}, failed{0}, events{0};
  std::map<std::string, std::vector<std::uint64_t>> seeds;  ///< by kind of violation
  std::vector<std::uint64_t> unproductive;  ///< seeds with under four fifths of requests done
};

void note(findings& all, std::uint64_t seed, const options& of, const report& r) {
  const std::lock_guard hold{all.guard};
  ++all.runs;
  all.done += r.done;
  all.failed += r.failed;
  all.events += r.events;
  if (!r.violation.empty()) {
    all.seeds[kind_of(r.violation)].push_back(seed);
    std::cerr << "seed " << seed << ": " << r.violation << std::endl;
  } else if (!of.traced && r.done * 5 < std::uint64_t{of.requests} * 4) {
    all.unproductive.push_back(seed);
  }
}

int explore(const wish& what, range seeds) {
  findings all;
  std::atomic<std::uint64_t> next{seeds.first};
  std::vector<std::thread> workers;
  for (std::uint32_t i = 0; i < what.jobs; ++i) {
    workers.emplace_back([&] {
      for (auto seed = next++; seed <= seeds.last; seed = next++) {
        const auto of = what.of(seed);
        note(all, seed, of, run(of));
      }
    });
  }
  for (auto& worker : workers) worker.join();

  std::cout << all.runs << (what.large ? " large" : " small") << " clusters, faults x"
            << what.fault_factor << ", seeds " << seeds.first << ".." << seeds.last << ": "
            << all.done << " requests done, " << all.failed << " failed with a reason, "
            << all.events << " events\n";
  std::uint64_t broken = 0;
  for (auto& [kind, found] : all.seeds) {
    std::ranges::sort(found);
    broken += found.size();
    std::cout << "  " << found.size() << " x " << kind << ":";
    for (std::size_t i = 0; i < found.size() && i < 20; ++i) std::cout << " " << found[i];
    std::cout << (found.size() > 20 ? " ...\n" : "\n");
  }
  if (what.large) {
    std::ranges::sort(all.unproductive);
    std::cout << "  under four fifths done: " << all.unproductive.size();
    for (const auto seed : all.unproductive) std::cout << " " << seed;
    std::cout << "\n";
  }
  std::cout << all.runs - broken << " passed, " << broken << " failed" << std::endl;
  return broken == 0 ? 0 : 1;
}

int show(options of) {
  of.traced = true;
  of.trace_lines = 1'000'000;
  const auto r = run(of);
  std::cout << r.trace;
  return r.violation.empty() ? 0 : 1;
}

int show_smallest(const wish& what, std::uint64_t seed, std::uint32_t tries) {
  const auto least =
      shrink(what.of(seed), tries, [](const std::string& line) { std::cerr << line << std::endl; });
  if (least.story.violation.empty()) {
    std::cout << "seed " << seed << " breaks no invariant\n";
    return 1;
  }
  const auto& of = least.of;
  std::cout << least.story.trace << "seed " << seed << ", cut down to "
            << of.prefills + of.decodes - of.absent_nodes.size() << " nodes, "
            << of.requests - of.unasked_requests.size() << " requests and "
            << std::ranges::count(*of.faults, true, &drawn_fault::happens)
            << " faults: " << least.story.violation << std::endl;
  return 0;
}

}  // namespace
}  // namespace troupe::actors::cluster_simulation

int main(int argc, char** argv) {
  // Each run builds and drops a whole cluster: keep its pages for the next one.
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  using namespace troupe::actors::cluster_simulation;
  CLI::App app{"Runs simulated clusters with many seeds, or cuts a failing one down"};
  std::string seeds;
  std::uint64_t seed = 0;
  std::uint32_t tries = 30;
  wish what;
  what.jobs = std::max(1U, std::thread::hardware_concurrency());
  auto* many = app.add_option("--seeds", seeds, "run these, A..B")->type_name("A..B");
  auto* one =
      app.add_option("--shrink", seed, "the smallest story found that breaks what this breaks")
          ->type_name("SEED");
  many->excludes(one);
  auto* trace =
      app.add_option("--trace", seed, "all that happens with that one")->type_name("SEED");
  trace->excludes(many)->excludes(one);
  app.add_flag("--large", what.large,
               "1,000 nodes and 10,000 requests instead of a handful and 600");
  app.add_option("--faults", what.fault_factor, "so many times as frequent")
      ->check(CLI::Range(0.0, 1000.0));
  app.add_option("--tries", tries, "other dice per attempt to cut something off")
      ->check(CLI::Range(0, 100'000));
  app.add_option("--jobs", what.jobs, "threads (number of cores)")->check(CLI::Range(1, 1024));
  try {
    app.parse(argc, argv);
    if (*one) return show_smallest(what, seed, tries);
    if (*trace) return show(what.of(seed));
    if (!*many) throw CLI::RequiredError{"--seeds, --shrink or --trace"};
    return explore(what, range_of(seeds));
  } catch (const CLI::ParseError& wrong) {
    return app.exit(wrong) == 0 ? 0 : 2;
  } catch (const std::exception& wrong) {
    std::cerr << wrong.what() << "\n";
    return 2;
  }
}
