/// Draws what two replicas of engines do from a seed, lets real nodes do it, and compares every byte and every
/// outcome with a model.
///
///     engine_fuzz --seed N            one seed; prints its story
///     engine_fuzz --seeds A..B        each of these
///     engine_fuzz --minutes M         as many as go, from --from N on (1)
///
/// Each seed has a process of its own, so that a crash is a finding like any other. Exit code 0: nothing was found.

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <limits>
#include <optional>
#include <sstream>
#include <string>

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "troupe/actors/logging.hpp"

#include "driver.hpp"
#include "memory_reach.hpp"

namespace troupe::engine_fuzz {
namespace {

using std::chrono::steady_clock;

struct arguments {
  std::uint64_t first{1}, last{1};
  std::chrono::seconds budget{0};  ///< 0: none
  std::uint64_t most_bytes{64U << 20U};
  bool tells{false};
  bool draws_only{false};
};

std::optional<arguments> parse(int argc, char** argv) {
  arguments a;
  bool chosen = false;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--draw") {
      a.draws_only = a.tells = true;
      continue;
    }
    if (i + 1 == argc) return std::nullopt;
    const std::string value = argv[++i];
    if (word == "--seed") {
      a.first = a.last = std::strtoull(value.c_str(), nullptr, 10);
      a.tells = true;
    } else if (word == "--seeds") {
      const auto dots = value.find("..");
      if (dots == std::string::npos) return std::nullopt;
      a.first = std::strtoull(value.c_str(), nullptr, 10);
      a.last = std::strtoull(value.c_str() + dots + 2, nullptr, 10);
    } else if (word == "--minutes") {
      a.budget = std::chrono::seconds{static_cast<long>(std::stod(value) * 60)};
      if (!chosen) a.last = std::numeric_limits<std::uint64_t>::max();
    } else if (word == "--from") {
      a.first = std::strtoull(value.c_str(), nullptr, 10);
      continue;
    } else {
      return std::nullopt;
    }
    chosen = true;
  }
  return chosen ? std::optional{a} : std::nullopt;
}

/// Over shm alone a cache that is not the pool's moves only where processes reach each other's memory.
const std::vector<std::string>& backends() {
  static const auto all = [] {
    const auto why = testing::why_memory_is_out_of_reach();
    if (why) std::cout << "no story is told over shm alone: " << *why << std::endl;
    return std::vector<std::string>{"tcp", why ? "tcp" : "shm", "auto"};
  }();
  return all;
}

scenario drawn(std::uint64_t seed, const arguments& a) {
  return draw(seed, backends(), a.most_bytes);
}

/// The child's words: "count N..." and a finding a line.
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
  tell(fd, run(s));
  std::fflush(nullptr);
  ::_exit(0);
}

/// What a child says until it ends, or is ended.
std::string listen(int fd, pid_t child) {
  // Longer than every wait of it.
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

int main_of(int argc, char** argv) {
  const auto a = parse(argc, argv);
  if (!a) {
    std::cerr
        << "usage: engine_fuzz --seed N | --seeds A..B | --minutes M [--from N] | ... --draw\n";
    return 2;
  }
  (void)backends();  // no child says again what is left out
  const auto begin = steady_clock::now();
  tally sum;
  std::uint64_t seeds = 0;
  std::uint64_t bad = 0;
  for (auto seed = a->first; seed <= a->last; ++seed) {
    if (a->budget.count() > 0 && steady_clock::now() - begin >= a->budget) break;
    if (a->tells) std::cout << describe(drawn(seed, *a)) << std::flush;
    if (a->draws_only) continue;
    const auto report = run_apart(seed, *a);
    ++seeds;
    sum += report.counts;
    if (report.findings.empty()) continue;
    ++bad;
    if (!a->tells) std::cout << describe(drawn(seed, *a), detail::requests);
    std::cout << "seed " << seed << " found:\n";
    for (const auto& one : report.findings) std::cout << "  " << one << "\n";
    std::cout << "again: engine_fuzz --seed " << seed << std::endl;
  }
  const auto seconds =
      std::chrono::duration_cast<std::chrono::seconds>(steady_clock::now() - begin).count();
  std::cout << seeds << " seeds in " << seconds << " s: " << sum.transfers
            << " sends and receives, of which " << sum.arrived
            << " receives were compared whole and " << sum.failed << " failed as they may; "
            << sum.values << " values; " << sum.wrong_calls << " wrong calls refused by name; "
            << (sum.bytes >> 20U) << " MiB compared; " << bad << " seeds found something\n";
  return bad == 0 ? 0 : 1;
}

}  // namespace
}  // namespace troupe::engine_fuzz

int main(int argc, char** argv) {
  return troupe::engine_fuzz::main_of(argc, argv);
}
