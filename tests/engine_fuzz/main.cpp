/// Draws from a seed what two replicas of engines do, lets real nodes do it, and compares every
/// byte and every outcome with a model.
///
///     engine_fuzz --seed N            one seed; prints its story
///     engine_fuzz --seeds A..B,C,D    each of these seeds
///     engine_fuzz --minutes M         as many seeds as possible, from --from N on (1)
///     ... --backend shm               only over this backend, else over any that the machine has
///
/// GPUs are doubles: their memory is host memory. Each seed runs in a process of its own, so that a
/// crash is a finding like any other. Exit code 0: nothing was found.

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "troupe/actors/logging.hpp"
#include "troupe/transport/xgmi/gpu_site.hpp"

#include "arguments.hpp"
#include "driver.hpp"
#include "gpu_double.hpp"

namespace troupe::engine_fuzz {
namespace {

using std::chrono::steady_clock;

scenario drawn(std::uint64_t seed, const arguments& a) {
  return draw(seed, a.backends, a.most_bytes);
}

/// Writes the child's report: "count N...", then one line per finding.
void tell(int fd, const run_report& report) {
  std::ostringstream out;
  const auto& c = report.counts;
  out << "count " << c.transfers << " " << c.arrived << " " << c.failed << " " << c.wrong_calls
      << " " << c.values << " " << c.bytes << "\n";
  for (const auto& one : report.findings) out << one << "\n";
  const auto text = out.str();
  for (std::size_t at = 0; at < text.size();) {
    const auto written = ::write(fd, text.data() + at, text.size() - at);
    if (written <= 0) return;
    at += static_cast<std::size_t>(written);
  }
}

[[noreturn]] void play(std::uint64_t seed, const arguments& a, int fd) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  const char* level = std::getenv("TROUPE_TEST_LOG");
  (void)actors::init_logging({level != nullptr ? level : "off", "fuzz", {}, 64U << 20U, 3});
  const auto s = drawn(seed, a);
  if (s.has_gpus()) transport::xgmi::gpu_site::set_maker(transport::xgmi::double_site);
  tell(fd, run(s));
  std::fflush(nullptr);
  ::_exit(0);
}

/// Reads what a child writes until it ends or is killed.
std::string listen(int fd, pid_t child) {
  // Longer than any wait of the child.
  const auto until = steady_clock::now() + std::chrono::minutes{10};
  std::string text;
  char buffer[4096];
  for (;;) {
    pollfd wanted{fd, POLLIN, 0};
    if (::poll(&wanted, 1, 1000) > 0) {
      const auto got = ::read(fd, buffer, sizeof buffer);
      if (got <= 0) return text;
      text.append(buffer, static_cast<std::size_t>(got));
    }
    if (steady_clock::now() < until) continue;
    ::kill(child, SIGKILL);
    return text + "it did not end within 10 minutes\n";
  }
}

run_report run_apart(std::uint64_t seed, const arguments& a) {
  run_report report;
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) {
    report.findings.emplace_back("no pipe");
    return report;
  }
  const auto child = ::fork();
  if (child == 0) {
    ::close(ends[0]);
    play(seed, a, ends[1]);
  }
  ::close(ends[1]);
  std::istringstream said{listen(ends[0], child)};
  ::close(ends[0]);
  int status = 0;
  ::waitpid(child, &status, 0);
  std::string line;
  while (std::getline(said, line)) {
    if (!line.starts_with("count ")) {
      report.findings.push_back(line);
      continue;
    }
    auto& c = report.counts;
    std::istringstream words{line.substr(6)};
    words >> c.transfers >> c.arrived >> c.failed >> c.wrong_calls >> c.values >> c.bytes;
  }
  if (WIFSIGNALED(status))
    report.findings.push_back("it crashed: signal " + std::to_string(WTERMSIG(status)));
  return report;
}

/// The results of all seeds.
struct summary {
  tally counts;
  std::uint64_t seeds{0};
  std::uint64_t bad{0};                 ///< that found something
  std::vector<seed_range> not_reached;  ///< in the time that there was
};

void play_apart(std::uint64_t seed, const arguments& a, summary& sum) {
  if (a.tells) std::cout << describe(drawn(seed, a)) << std::flush;
  if (a.draws_only) return;
  const auto report = run_apart(seed, a);
  ++sum.seeds;
  sum.counts += report.counts;
  if (report.findings.empty()) return;
  ++sum.bad;
  if (!a.tells) std::cout << describe(drawn(seed, a), detail::requests);
  std::cout << "seed " << seed << " found:\n";
  for (const auto& one : report.findings) std::cout << "  " << one << "\n";
  std::cout << "again: engine_fuzz";
  if (a.backends.size() == 1) std::cout << " --backend " << a.backends.front();
  std::cout << " --seed " << seed << std::endl;
}

summary play_all(const arguments& a) {
  const auto begin = steady_clock::now();
  summary sum;
  for (const auto& range : a.seeds) {
    for (auto seed = range.first;; ++seed) {
      if (a.budget.count() > 0 && steady_clock::now() - begin >= a.budget) {
        sum.not_reached.push_back({seed, range.last});
        break;
      }
      play_apart(seed, a, sum);
      if (seed == range.last) break;
    }
  }
  return sum;
}

/// Prints which seeds were reached and which were not; prints nothing if the seeds have no end.
void tell_reached(const summary& sum) {
  std::ostringstream names;
  auto all = sum.seeds;
  for (const auto& range : sum.not_reached) {
    if (range.last == std::numeric_limits<std::uint64_t>::max()) return;
    names << (names.tellp() == 0 ? ", not reached: " : ",") << range.first;
    if (range.last != range.first) names << ".." << range.last;
    all += range.last - range.first + 1;
  }
  std::cout << sum.seeds << " of " << all << " seeds" << names.str() << "\n";
}

int main_of(int argc, char** argv) {
  const auto a = read_arguments({argv + 1, argv + argc});
  if (!a) {
    std::cerr << "engine_fuzz: " << a.error().message << "\n" << usage;
    return 2;
  }
  const auto begin = steady_clock::now();
  const auto sum = play_all(*a);
  if (a->draws_only) return 0;
  const auto seconds =
      std::chrono::duration_cast<std::chrono::seconds>(steady_clock::now() - begin).count();
  const auto& c = sum.counts;
  tell_reached(sum);
  std::cout << sum.seeds << " seeds in " << seconds << " s: " << c.transfers
            << " sends and receives, of which " << c.arrived << " receives were compared whole and "
            << c.failed << " failed as they may; " << c.values << " values; " << c.wrong_calls
            << " wrong calls refused by name; " << (c.bytes >> 20U) << " MiB compared; " << sum.bad
            << " seeds found something\n";
  return sum.bad == 0 ? 0 : 1;
}

}  // namespace
}  // namespace troupe::engine_fuzz

int main(int argc, char** argv) {
  return troupe::engine_fuzz::main_of(argc, argv);
}
