// How long a surviving engine waits until it is told of a fault, and until another node has done
// the faulty node's work: killed, frozen and cut-off peers, a dead supervisor. And whether full
// load alone is ever taken for a fault.
//
//   recovery_bench [--rounds N] [--soak SECONDS]

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <unistd.h>

#include "recovery_cluster.hpp"
#include "rows.hpp"

namespace {

using namespace troupe::bench;
using namespace std::chrono_literals;
using troupe::actors::transfer_mode;

/// The limits, ms.
constexpr double killed_within = 200;
constexpr double silent_within = 1000;
constexpr double carried_within = 500;  ///< after the notice
constexpr double idle_within = 6000;    ///< heartbeat_timeout, which is 5 s, and one more

enum class fault { killed, frozen, cut };

struct scenario {
  fault what{fault::killed};
  bool of_prefill{true};
  std::string backend;
  transfer_mode mode{transfer_mode::write};
};

struct times {
  double told{0};     ///< ms from the fault until the engine has its outcome
  double carried{0};  ///< from there until a transfer with another node is done; NaN: not measured
};

double ms_between(clock_type::time_point from, clock_type::time_point to) {
  return std::chrono::duration<double, std::milli>(to - from).count();
}

/// Runs `body` in a process of its own, with all its children. A process that does not end ends the
/// benchmark.
template <class Result, class Body>
Result apart(const Body& body) {
  const auto child = fork_child([&](const control& parent) {
    parent.put(body());
    std::_Exit(0);
  });
  Result result{};
  if (::read(child.fd, &result, sizeof result) != static_cast<ssize_t>(sizeof result)) {
    die("a round did not come to its end");
  }
  ::close(child.fd);
  return result;
}

/// Sleeps so that the fault comes at a random moment between two checks of the watching side.
void rest_a_while(recovery_cluster& c) {
  static std::mt19937_64 dice{1};
  c.rest(150ms + std::chrono::milliseconds{dice() % 250});
}

void strike(recovery_cluster& c, fault what, const std::string& victim) {
  switch (what) {
    case fault::killed: c.signal(victim, SIGKILL); return;
    case fault::frozen: c.signal(victim, SIGSTOP); return;
    case fault::cut: recovery_cluster::cut_prefill_0(); return;
  }
}

recovery_cluster::ending expect(const std::optional<recovery_cluster::ending>& ended,
                                const char* what) {
  if (!ended) die(std::string{what} + " has no outcome within 90 s");
  return *ended;
}

times measure(const scenario& s) {
  using computed = recovery_cluster::computed;
  if (s.what == fault::cut && !recovery_cluster::enter_own_network()) die("no own network");
  const std::string survivor = s.of_prefill ? "decode-0" : "prefill-0";
  const std::string victim = s.of_prefill ? "prefill-0" : "decode-0";
  // A prefill node that is cut off from one decode node but not from another is not possible here:
  // both decode nodes have one address.
  const bool carries = s.of_prefill || s.what != fault::cut;
  recovery_cluster c{{s.backend, s.mode, "16MiB", s.what == fault::cut}, survivor};
  c.acquaint("prefill-0", "decode-0");
  if (s.of_prefill) {
    c.acquaint("prefill-1", "decode-0");
    c.offer("prefill-1", "again", computed::whole);
  } else {
    c.acquaint("prefill-0", "decode-1");
  }
  c.offer("prefill-0", "r", computed::half);
  c.ask("decode-0", "prefill-0", "r");
  rest_a_while(c);
  const auto struck = clock_type::now();
  strike(c, s.what, victim);
  const auto told = expect(c.outcome("r", 90s), "what the fault ended");
  if (!told.failure) die("what the fault ended was done");
  times taken{ms_between(struck, told.at), std::nan("")};
  if (carries) {
    if (s.of_prefill) {
      c.ask("decode-0", "prefill-1", "again");
    } else {
      c.offer("prefill-0", "again", computed::whole);
      c.ask("decode-1", "prefill-0", "again");
    }
    const auto again = expect(c.outcome("again", 90s), "the second transfer");
    if (again.failure) die("the second transfer failed: " + to_string(*again.failure));
    taken.carried = ms_between(told.at, again.at);
  }
  // Frozen processes cannot end with their parent.
  if (s.what == fault::frozen) c.signal(victim, SIGKILL);
  return taken;
}

/// Waits until a frozen idle peer is no longer a member: its link has ended.
times measure_idle(const std::string& backend) {
  recovery_cluster c{{backend, transfer_mode::write, "16MiB", false}, "decode-0"};
  c.acquaint("prefill-0", "decode-0");
  rest_a_while(c);
  const auto struck = clock_type::now();
  c.signal("prefill-0", SIGSTOP);
  const auto linked = [&] {
    const auto links = c.node().report().links;
    return std::ranges::any_of(links, [](const auto& l) { return l.state == "up"; });
  };
  while (linked()) {
    if (clock_type::now() - struck > 90s) die("the idle peer is never noticed");
    c.rest(5ms);
  }
  const auto took = ms_between(struck, clock_type::now());
  c.signal("prefill-0", SIGKILL);
  return {took, std::nan("")};
}

struct supervisor_times {
  double failed{0};  ///< failed transfers, of those that ran meanwhile
  double ran{0};
  double placed{0};  ///< ms from the start of the next supervisor until it places a request
};

supervisor_times measure_supervisor(const std::string& backend, transfer_mode mode) {
  recovery_cluster c{{backend, mode, "16MiB", false}, "decode-0"};
  c.acquaint("prefill-0", "decode-0");
  supervisor_times taken;
  // One request is in progress when the supervisor dies, and others begin while there is none.
  c.offer("prefill-0", "0", recovery_cluster::computed::whole);
  c.ask("decode-0", "prefill-0", "0");
  c.signal("supervisor", SIGKILL);
  const auto until = clock_type::now() + 1500ms;
  for (int i = 0;; ++i) {
    const auto ended = expect(c.outcome(std::to_string(i), 90s), "a transfer without a supervisor");
    taken.ran += 1;
    if (ended.failure) taken.failed += 1;
    if (clock_type::now() >= until) break;
    const auto next = std::to_string(i + 1);
    c.offer("prefill-0", next, recovery_cluster::computed::whole);
    c.ask("decode-0", "prefill-0", next);
  }
  const auto begun = clock_type::now();
  c.next_supervisor();
  for (bool placed = false; !placed;) {
    if (clock_type::now() - begun > 60s) die("the next supervisor never places anything");
    auto asked = need(c.node().place({"p", "prefill", "decode", 1000}), "place");
    for (bool ended = false; !ended;) {
      for (const auto& e : c.node().wait(20ms)) {
        if (e.operation != asked) continue;
        ended = true;
        placed = std::holds_alternative<troupe::event_placed>(e.what);
      }
    }
  }
  taken.placed = ms_between(begun, clock_type::now());
  return taken;
}

// -- rows

const char* name_of(fault what) {
  switch (what) {
    case fault::killed: return "killed";
    case fault::frozen: return "frozen";
    case fault::cut: return "cut off";
  }
  return "";
}

/// The worst value against the limit; least, median and most go to standard error.
row worst(const std::string& name, std::vector<double> of, double limit) {
  std::ranges::sort(of);
  std::fprintf(stderr, "%-58s %8.0f /%8.0f /%8.0f ms  (asked for: %.0f)\n", name.c_str(),
               of.front(), of[of.size() / 2], of.back(), limit);
  row r;
  r.name = name;
  r.ours = of.back();
  r.rival = limit;
  r.wanted = 1.0;
  r.unit = "ms";
  r.lower_is_better = true;
  return r;
}

void add_fault(std::vector<row>& rows, const scenario& s, int rounds) {
  std::vector<double> told;
  std::vector<double> carried;
  for (int i = 0; i < rounds; ++i) {
    const auto taken = apart<times>([&] { return measure(s); });
    told.push_back(taken.told);
    if (!std::isnan(taken.carried)) carried.push_back(taken.carried);
  }
  const auto name = std::string{name_of(s.what)} + (s.of_prefill ? " prefill, " : " decode, ") +
                    s.backend + (s.mode == transfer_mode::write ? " write" : " read");
  const auto limit = s.what == fault::killed ? killed_within : silent_within;
  rows.push_back(worst(name + ": told", std::move(told), limit));
  if (!carried.empty())
    rows.push_back(worst(name + ": then elsewhere", std::move(carried), carried_within));
}

/// A count that should be 0.
row none_of(const std::string& name, double count, double of) {
  std::fprintf(stderr, "%-58s %8.0f of %.0f\n", name.c_str(), count, of);
  row r;
  r.name = name;
  r.ours = count;
  r.rival = of;
  r.wanted = 0.0;
  r.lower_is_better = true;
  return r;
}

void add_supervisor(std::vector<row>& rows, const std::string& backend, transfer_mode mode,
                    int rounds) {
  double failed = 0;
  double ran = 0;
  std::vector<double> placed;
  for (int i = 0; i < rounds; ++i) {
    const auto taken = apart<supervisor_times>([&] { return measure_supervisor(backend, mode); });
    failed += taken.failed;
    ran += taken.ran;
    placed.push_back(taken.placed);
  }
  const auto name =
      "dead supervisor, " + backend + (mode == transfer_mode::write ? " write" : " read");
  rows.push_back(none_of(name + ": transfers failed", failed, ran));
  rows.push_back(worst(name + ": the next one places again", std::move(placed), 2000));
}

std::vector<row> all(int rounds) {
  std::vector<row> rows;
  std::fprintf(stderr, "%-58s %8s /%8s /%8s\n", "", "least", "median", "most");
  constexpr transfer_mode both[]{transfer_mode::write, transfer_mode::read};
  for (const auto what : {fault::killed, fault::frozen}) {
    for (const bool of_prefill : {true, false}) {
      for (const std::string backend : {"shm", "tcp"}) {
        for (const auto mode : both) add_fault(rows, {what, of_prefill, backend, mode}, rounds);
      }
    }
  }
  if (apart<bool>([] { return recovery_cluster::enter_own_network(); })) {
    for (const bool of_prefill : {true, false}) {
      for (const auto mode : both) add_fault(rows, {fault::cut, of_prefill, "tcp", mode}, rounds);
    }
  } else {
    std::fprintf(stderr, "no network of its own (needs root and `ip`): no wire is cut\n");
  }
  for (const std::string backend : {"shm", "tcp"}) {
    for (const auto mode : both) add_supervisor(rows, backend, mode, rounds);
  }
  for (const std::string backend : {"shm", "tcp"}) {
    std::vector<double> told;
    for (int i = 0; i < rounds; ++i) {
      told.push_back(apart<times>([&] { return measure_idle(backend); }).told);
    }
    rows.push_back(
        worst("frozen while idle, " + backend + ": its link ends", std::move(told), idle_within));
  }
  return rows;
}

// -- full load

struct soaked {
  double transfers{0}, failed{0}, broken{0};
};

/// Small and large transfers from two prefill nodes, and as many processes that only burn as there are
/// cores.
soaked soak(const std::string& backend, transfer_mode mode, std::chrono::seconds time) {
  const auto cores = std::max(1L, ::sysconf(_SC_NPROCESSORS_ONLN));
  std::vector<control> burners;
  for (long i = 0; i < cores; ++i) {
    burners.push_back(fork_child([](const control&) {
      for (volatile std::uint64_t count = 0;;) count = count + 1;
    }));
  }
  recovery_cluster c{{backend, mode, "256MiB", false}, "decode-0"};
  c.acquaint("prefill-0", "decode-0");
  c.acquaint("prefill-1", "decode-0");
  constexpr std::uint64_t window = 12;
  constexpr std::uint32_t many_tokens = 8192;  // 8 MiB
  soaked sum;
  const auto until = clock_type::now() + time;
  std::uint64_t begun = 0;
  std::uint64_t ended = 0;
  while (ended < begun || clock_type::now() < until) {
    while (begun < ended + window && clock_type::now() < until) {
      const auto prefill = "prefill-" + std::to_string(begun % 2);
      const auto tokens = begun % 4 < 2 ? many_tokens : recovery_cluster::few_tokens;
      const auto request = "s" + std::to_string(begun++);
      c.offer(prefill, request, recovery_cluster::computed::whole, tokens);
      c.ask("decode-0", prefill, request, tokens);
    }
    const auto one = expect(c.outcome("s" + std::to_string(ended++), 90s), "a transfer");
    sum.transfers += 1;
    if (one.failure) {
      std::fprintf(stderr, "a transfer failed: %s\n", to_string(*one.failure).c_str());
      sum.failed += 1;
    }
  }
  for (const auto& link : c.node().report().links) {
    sum.broken += link.rebuilds + (link.state == "up" ? 0 : 1);
    if (link.rebuilds > 0)
      std::fprintf(stderr, "%s broke: %s\n", link.peer.c_str(), link.last_break.c_str());
  }
  return sum;
}

std::vector<row> soak_all(std::chrono::seconds time) {
  std::vector<row> rows;
  for (const std::string backend : {"shm", "tcp"}) {
    for (const auto mode : {transfer_mode::write, transfer_mode::read}) {
      const auto sum = apart<soaked>([&] { return soak(backend, mode, time / 4); });
      const auto name = "full load for " + std::to_string((time / 4).count()) + " s, " + backend +
                        (mode == transfer_mode::write ? " write" : " read");
      rows.push_back(none_of(name + ": links broken", sum.broken, 2));
      rows.push_back(none_of(name + ": transfers failed", sum.failed, sum.transfers));
    }
  }
  return rows;
}

}  // namespace

int main(int count, char** arguments) {
  int rounds = 20;
  std::optional<std::chrono::seconds> soak_for;
  for (int i = 1; i < count; ++i) {
    const std::string_view word = arguments[i];
    if (word == "--rounds" && i + 1 < count) {
      rounds = std::max(1, std::atoi(arguments[++i]));
    } else if (word == "--soak" && i + 1 < count) {
      soak_for = std::chrono::seconds{std::max(4, std::atoi(arguments[++i]))};
    } else {
      die("usage: recovery_bench [--rounds N] [--soak SECONDS]");
    }
  }
  print(soak_for ? soak_all(*soak_for) : all(rounds));
  return 0;
}
