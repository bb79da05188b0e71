// `tests/run simulation --seeds A..B` and `--shrink SEED`: looks for runs that break an invariant,
// and for the smallest run that still breaks the same one.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <iostream>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>
#include <malloc.h>

#include "troupe/actors/logging.hpp"

#include "engine_simulation.hpp"
#include "link_simulation.hpp"
#include "shrink.hpp"
#include "simulation.hpp"

namespace troupe::actors {
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
  std::string of{"clusters"};
  bool large{false};
  double fault_factor{1};
  std::uint32_t jobs{std::max(1U, std::thread::hardware_concurrency())};
  std::uint32_t tries{30};
  std::string seeds;
  std::uint64_t seed{0};
  bool shrink{false}, trace{false};
};

template <class Options, class Report>
struct simulation : troupe::testing::shrinkable<Options, Report> {
  std::string name;
  std::function<Options(std::uint64_t)> of{};
  std::vector<std::pair<std::uint64_t Report::*, std::string>> counts{};
  /// Whether too little of a run succeeded; may be empty.
  std::function<bool(const Options&, const Report&)> unproductive{};
};

/// The results of many runs, collected by several threads.
struct findings {
  std::mutex guard;
  std::uint64_t runs{0};
  std::vector<std::uint64_t> counts;
  std::map<std::string, std::vector<std::uint64_t>> seeds;  ///< by kind of violation
  std::vector<std::uint64_t> unproductive;                  ///< seeds
};

template <class Options, class Report>
void note(findings& all, const simulation<Options, Report>& what, const Options& of,
          const Report& r) {
  const std::lock_guard hold{all.guard};
  ++all.runs;
  for (std::size_t i = 0; i < what.counts.size(); ++i) all.counts[i] += r.*what.counts[i].first;
  if (!r.violation.empty()) {
    all.seeds[what.kind_of(r.violation)].push_back(of.seed);
    std::cerr << "seed " << of.seed << ": " << r.violation << std::endl;
  } else if (what.unproductive && what.unproductive(of, r)) {
    all.unproductive.push_back(of.seed);
  }
}

template <class Options, class Report>
int explore(const wish& asked, const simulation<Options, Report>& what) {
  const auto seeds = range_of(asked.seeds);
  findings all;
  all.counts.resize(what.counts.size());
  std::atomic<std::uint64_t> next{seeds.first};
  std::vector<std::thread> workers;
  for (std::uint32_t i = 0; i < asked.jobs; ++i) {
    workers.emplace_back([&] {
      for (auto seed = next++; seed <= seeds.last; seed = next++) {
        const auto of = what.of(seed);
        note(all, what, of, what.run(of));
      }
    });
  }
  for (auto& worker : workers) worker.join();

  std::cout << all.runs << " " << what.name << ", faults x" << asked.fault_factor << ", seeds "
            << seeds.first << ".." << seeds.last;
  for (std::size_t i = 0; i < all.counts.size(); ++i) {
    std::cout << (i == 0 ? ": " : ", ") << all.counts[i] << " " << what.counts[i].second;
  }
  std::cout << "\n";
  std::uint64_t broken = 0;
  for (auto& [kind, found] : all.seeds) {
    std::ranges::sort(found);
    broken += found.size();
    std::cout << "  " << found.size() << " x " << kind << ":";
    for (std::size_t i = 0; i < found.size() && i < 20; ++i) std::cout << " " << found[i];
    std::cout << (found.size() > 20 ? " ...\n" : "\n");
  }
  if (what.unproductive) {
    std::ranges::sort(all.unproductive);
    std::cout << "  under four fifths done: " << all.unproductive.size();
    for (const auto seed : all.unproductive) std::cout << " " << seed;
    std::cout << "\n";
  }
  std::cout << all.runs - broken << " passed, " << broken << " failed" << std::endl;
  return broken == 0 ? 0 : 1;
}

template <class Options, class Report>
int show(const simulation<Options, Report>& what, Options of) {
  of.traced = true;
  if constexpr (requires { of.trace_lines; }) of.trace_lines = 1'000'000;
  const auto r = what.run(of);
  // The others print their steps as they go.
  if constexpr (requires { r.trace; }) std::cout << r.trace;
  if (r.violation.empty()) return 0;
  std::cout << r.violation << std::endl;
  return 1;
}

template <class Options, class Report>
int show_smallest(const wish& asked, const simulation<Options, Report>& what) {
  const auto least = troupe::testing::shrink<Options, Report>(
      what, what.of(asked.seed), asked.tries,
      [](const std::string& line) { std::cerr << line << std::endl; });
  if (least.story.violation.empty()) {
    std::cout << "seed " << asked.seed << " breaks no invariant\n";
    return 1;
  }
  static_cast<void>(show(what, least.of));
  std::cout << "seed " << asked.seed << " was cut down to " << least.left << std::endl;
  return 0;
}

template <class Options, class Report>
int serve(const wish& asked, const simulation<Options, Report>& what) {
  if (asked.shrink) return show_smallest(asked, what);
  if (asked.trace) return show(what, what.of(asked.seed));
  return explore(asked, what);
}

int serve_clusters(const wish& asked) {
  using namespace cluster_simulation;
  simulation<options, report> what{whole(), asked.large ? "large clusters" : "small clusters"};
  what.of = [asked](std::uint64_t seed) {
    auto of = asked.large ? large(seed) : small(seed);
    of.faults_per_second *= asked.fault_factor;
    return of;
  };
  what.counts = {{&report::done, "requests done"},
                 {&report::failed, "failed with a reason"},
                 {&report::events, "events"}};
  if (asked.large) {
    what.unproductive = [](const options& of, const report& r) {
      return r.done * 5 < std::uint64_t{of.requests} * 4;
    };
  }
  return serve(asked, what);
}

template <class Options>
std::function<Options(std::uint64_t)> some_nodes(double fault_factor) {
  return [fault_factor](std::uint64_t seed) {
    Options of;
    of.seed = seed;
    of.faults_per_second *= fault_factor;
    return of;
  };
}

int serve_links(const wish& asked) {
  using namespace link_simulation;
  simulation<options, report> what{whole(), "pairs of nodes",
                                   some_nodes<options>(asked.fault_factor)};
  what.counts = {{&report::moved, "transfers moved"},
                 {&report::given_up, "given up with a reason"},
                 {&report::events, "events"}};
  return serve(asked, what);
}

int serve_engines(const wish& asked) {
  using namespace engine_simulation;
  simulation<options, report> what{whole(), "pairs of replicas",
                                   some_nodes<options>(asked.fault_factor)};
  what.counts = {{&report::requests, "requests"}, {&report::events, "events"}};
  return serve(asked, what);
}

}  // namespace
}  // namespace troupe::actors

int main(int argc, char** argv) {
  // Each run builds and drops a whole cluster: keep its pages for the next one.
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  using namespace troupe::actors;
  CLI::App app{"Runs simulations with many seeds, or cuts a failing one down"};
  wish asked;
  app.add_option("--of", asked.of, "what is simulated (clusters)")
      ->check(CLI::IsMember({"clusters", "links", "engines"}));
  auto* many = app.add_option("--seeds", asked.seeds, "run these, A..B")->type_name("A..B");
  auto* one = app.add_option("--shrink", asked.seed,
                             "the smallest story found that breaks what this breaks")
                  ->type_name("SEED");
  many->excludes(one);
  auto* trace =
      app.add_option("--trace", asked.seed, "all that happens with that one")->type_name("SEED");
  trace->excludes(many)->excludes(one);
  app.add_flag("--large", asked.large,
               "1,000 nodes and 10,000 requests instead of a handful and 600");
  app.add_option("--faults", asked.fault_factor, "so many times as frequent")
      ->check(CLI::Range(0.0, 1000.0));
  app.add_option("--tries", asked.tries, "other dice per attempt to cut something off")
      ->check(CLI::Range(0, 100'000));
  app.add_option("--jobs", asked.jobs, "threads (number of cores)")->check(CLI::Range(1, 1024));
  try {
    app.parse(argc, argv);
    asked.shrink = one->count() > 0;
    asked.trace = trace->count() > 0;
    if (!*many && !*one && !*trace) throw CLI::RequiredError{"--seeds, --shrink or --trace"};
    if (asked.large && asked.of != "clusters") {
      throw CLI::ValidationError{"--large", "only clusters can be large"};
    }
    if (!init_logging({.level = "off", .node = {}, .file = {}})) return 2;
    if (asked.of == "links") return serve_links(asked);
    if (asked.of == "engines") return serve_engines(asked);
    return serve_clusters(asked);
  } catch (const CLI::ParseError& wrong) {
    return app.exit(wrong) == 0 ? 0 : 2;
  } catch (const std::exception& wrong) {
    std::cerr << wrong.what() << "\n";
    return 2;
  }
}
