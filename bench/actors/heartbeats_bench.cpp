// The cost of 1,000 nodes for their supervisor: a real supervisor in a process of its own, and
// simulated nodes in others that register and send a heartbeat every second, over real connections.
// Prints a JSON array of {name, ours, rival, ratio, unit, wanted, better}; where a limit is
// absolute, the rival is the limit.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

#include "troupe/actors/logging.hpp"
#include "troupe/actors/membership/membership_store.hpp"
#include "troupe/actors/runtime/system.hpp"
#include "troupe/actors/supervisor/supervisor.hpp"

#include "node_process.hpp"
#include "parts.hpp"
#include "simulated_peers.hpp"

namespace {

using namespace troupe;
using namespace troupe::bench;
using namespace std::chrono_literals;

struct plan {
  std::size_t nodes{1000};
  /// Long enough for one list of loads to every node, with 1,000 nodes.
  std::chrono::seconds time{50};
};

enum class kind { bare, real };

config::deployment deployment(std::size_t nodes, std::uint16_t port) {
  const auto stage = [](const std::string& name, std::size_t replicas) {
    return "  - {name: " + name + ", role: " + name + ", replicas: " + std::to_string(replicas) +
           ", hosts: [127.0.0.1], engine: external, pool: {device: cpu, size: 16MiB}}\n";
  };
  const auto text = "cluster: bench\nsupervisor: {host: 127.0.0.1, port: " + std::to_string(port) +
                    "}\nsecurity: {mode: none}\nmodel: {layers: 1, kv_heads: 1, head_dim: 32, "
                    "dtype: fp16, block_tokens: 16}\n"
                    "stages:\n" +
                    stage("prefill", nodes / 2) + stage("decode", nodes - nodes / 2) +
                    "edges:\n  - {from: prefill, to: decode, mode: write}\n";
  return parsed(text);
}

/// A supervisor as `troupe node` runs it, with its state in a file. Tells its port, then, whenever
/// asked, its processor time in seconds.
void supervise(const plan& of, kind what, std::uint16_t port, const std::string& folder,
               const control& parent) {
  need(actors::init_logging({"info", "supervisor", folder + "/log", 64u << 20, 3}), "log");
  actors::actor_host host;
  const auto start = [&] {
    if (what == kind::bare) return spawn_bare_supervisor(host.system(), 1000ms);
    auto options = actors::supervisor_options_from(deployment(of.nodes, port));
    options.store = need(actors::membership_store::open(folder + "/state", "bench"), "state");
    return actors::spawn_supervisor(host.system(), std::move(options));
  };
  parent.put(need(host.publish(start(), "127.0.0.1", port), "supervisor"));
  for (;;) {
    if (parent.get<char>() == 'k') std::_Exit(0);  // as if killed: closes and reports nothing
    parent.put(processor_seconds());
  }
}

/// The processes of one measurement.
class cluster {
 public:
  cluster(const plan& of, kind what, std::size_t processes) : plan_{of}, what_{what} {
    char name[] = "/tmp/troupe-heartbeats-XXXXXX";
    if (::mkdtemp(name) == nullptr) die("mkdtemp");
    folder_ = name;
    start_supervisor(0);
    const auto slots = actors::supervisor_options_from(deployment(of.nodes, port_)).members.slots;
    for (std::size_t i = 0; i < processes; ++i) {
      std::vector<actors::expected_slot> mine;
      for (auto k = i; k < slots.size(); k += processes) mine.push_back(slots[k]);
      peers_.push_back(fork_child([&](const control& parent) {
        need(actors::init_logging({"error", "peers", {}, 64u << 20, 3}), "log");
        simulate_peers("bench", mine, slots.size(), port_, 1000ms, parent);
      }));
    }
  }
  ~cluster() { std::system(("rm -rf " + folder_).c_str()); }
  cluster(const cluster&) = delete;
  cluster& operator=(const cluster&) = delete;

  /// The supervisor's processor time, in seconds.
  [[nodiscard]] double processor() const {
    supervisor_.put('?');
    return supervisor_.get<double>();
  }
  [[nodiscard]] peer_count count() const {
    for (const auto& p : peers_) p.put('?');
    peer_count all;
    for (const auto& p : peers_) {
      const auto some = p.get<peer_count>();
      all.registered += some.registered;
      all.informed += some.informed;
      all.answered += some.answered;
      all.lists += some.lists;
      all.entries += some.entries;
    }
    return all;
  }
  /// Waits until every node is registered, and knows that all are up if the supervisor reports it.
  void until_complete() const {
    const auto start = clock_type::now();
    for (;;) {
      const auto now = count();
      const auto there = what_ == kind::bare ? now.registered : now.informed;
      if (there == plan_.nodes) return;
      if (seconds_since(start) > 300) {
        die("after 300 s " + std::to_string(now.registered) + " nodes are registered and " +
            std::to_string(now.informed) + " informed");
      }
      std::this_thread::sleep_for(20ms);
    }
  }
  void restart_supervisor() {
    supervisor_.put('k');
    ::wait(nullptr);
    ::close(supervisor_.fd);
    start_supervisor(port_);
  }

 private:
  void start_supervisor(std::uint16_t port) {
    supervisor_ =
        fork_child([&](const control& parent) { supervise(plan_, what_, port, folder_, parent); });
    port_ = supervisor_.get<std::uint16_t>();
  }

  const plan plan_;
  const kind what_;
  std::string folder_;
  control supervisor_;
  std::uint16_t port_{0};
  std::vector<control> peers_;
};

struct steady {
  double share{0};  ///< of a core, in percent
  peer_count during;
};

steady measure(const plan& of, const cluster& running) {
  running.until_complete();
  std::this_thread::sleep_for(3s);
  const auto first = running.count();
  const auto used = running.processor();
  const auto start = clock_type::now();
  std::this_thread::sleep_for(of.time);
  const auto share = (running.processor() - used) / seconds_since(start) * 100;
  const auto last = running.count();
  if (last.registered != of.nodes) die("a node was lost in steady state");
  return {share,
          {last.registered, last.informed, last.answered - first.answered, last.lists - first.lists,
           last.entries - first.entries}};
}

void heartbeats(const control& parent, const plan& of, std::size_t processes) {
  const auto where =
      std::to_string(of.nodes) + " nodes over " + std::to_string(processes) + " connections";
  steady bare;
  {
    const cluster running{of, kind::bare, processes};
    bare = measure(of, running);
  }
  const auto begun = clock_type::now();
  cluster running{of, kind::real, processes};
  running.until_complete();
  const auto came_up = seconds_since(begun);
  const auto took = running.processor();
  const auto real = measure(of, running);
  const auto per_second = [&](std::uint64_t count) {
    return static_cast<double>(count) / static_cast<double>(of.time.count());
  };
  char detail[160];
  std::snprintf(
      detail, sizeof detail,
      "(%.0f heartbeats/s answered, %.1f lists/s, %.0f entries/s; bare %.0f heartbeats/s)",
      per_second(real.during.answered), per_second(real.during.lists),
      per_second(real.during.entries), per_second(bare.during.answered));
  give(parent, {"supervisor's processor, " + where + ", vs limit", real.share, 10, 1.0, "%", true},
       detail);
  give(parent, {"the same, vs an actor that only answers", real.share, bare.share, {}, "%", true});
  const auto cost = [&](const char* what, double seconds, double processor) {
    std::snprintf(detail, sizeof detail, "(%.2f s of processor)", processor);
    give(parent,
         {std::string{what} + ", " + where + ": until all know of all, vs heartbeat_timeout",
          seconds,
          5,
          {},
          "s",
          true},
         detail);
  };
  cost("first start", came_up, took);
  const auto again = clock_type::now();
  running.restart_supervisor();
  running.until_complete();
  cost("supervisor restarted", seconds_since(again), running.processor());
}

}  // namespace

int main(int argc, char** argv) {
  plan of;
  std::vector<std::size_t> processes{4, 50};
  for (int i = 1; i < argc; ++i) {
    const std::string_view word{argv[i]};
    const auto number = [&] { return i + 1 < argc ? std::strtoul(argv[++i], nullptr, 10) : 0; };
    if (word == "--quick") {
      of = {100, 5s};
      processes = {4};
    } else if (word == "--nodes") {
      of.nodes = number();
    } else if (word == "--seconds") {
      of.time = std::chrono::seconds{number()};
    } else if (word == "--processes") {
      processes = {number()};
    } else {
      std::fputs("usage: heartbeats_bench [--quick] [--nodes N] [--seconds N] [--processes N]\n",
                 stderr);
      return 2;
    }
  }
  if (of.nodes < 2 || of.time < 1s || processes.front() < 1)
    die("a number is missing or too small");
  std::vector<std::string> rows;
  for (const auto count : processes) {
    for (auto& r : part([&](const control& c) { heartbeats(c, of, count); })) {
      rows.push_back(std::move(r));
    }
  }
  print(rows);
}
