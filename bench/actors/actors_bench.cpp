// Rows of the actors: what a keyed value and a transfer cost between two processes, against a bare
// socket and a bare link that do the same work in turns; what an idle transfer and an idle node
// cost; whether memory grows. Prints a JSON array of {name, ours, rival, ratio, unit, wanted,
// better}; where a limit is absolute, the rival is the limit. Each part has processes of its own.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "bare.hpp"
#include "cluster.hpp"
#include "parts.hpp"

namespace {

using namespace troupe;
using namespace troupe::bench;
using namespace std::chrono_literals;
using actors::transfer_mode;

bool quick = false;

struct way {
  std::string backend;
  bool polling{false};
  [[nodiscard]] std::string name() const {
    return backend + (polling ? ", polling" : ", event-driven");
  }
};

/// All of these rows are costs.
void give_cost(const control& runner, row r, const std::string& detail = {}) {
  r.lower_is_better = true;
  give(runner, r, detail);
}

/// Measurements of alternating rounds.
struct rounds {
  std::vector<double> mine;
  std::vector<double> theirs;
  void add(double ours, double rival) {
    mine.push_back(ours);
    theirs.push_back(rival);
  }
  [[nodiscard]] double ours() const { return median(mine); }
  [[nodiscard]] double rival() const { return median(theirs); }
};

template <class Once>
double median_of(int count, Once once) {
  std::vector<double> times;
  for (int i = 0; i < count; ++i) {
    const auto start = clock_type::now();
    once(i);
    times.push_back(microseconds_since(start));
  }
  return median(std::move(times));
}

// -- keyed values

struct value_size {
  std::size_t bytes;
  const char* name;
  double wanted;
  int count;
};

void values_of(const control& parent, const way& how, const value_size& what,
               bench_cluster& cluster, bare_socket& bare) {
  auto& node = cluster.node();
  // Large values of an engine lie in registered memory: its cache.
  std::vector<std::byte> small(std::min<std::size_t>(what.bytes, 64u << 10), std::byte{5});
  std::span<std::byte> bytes{small};
  if (what.bytes > small.size()) bytes = need(node.region(0), "region").first(what.bytes);
  std::ranges::fill(bytes, std::byte{5});
  const auto outcome_of = [&](result<operation_id> operation) {
    (void)need(std::move(operation), "keyed value");
    cluster.until_done(cluster.done + 1);
  };
  static std::uint64_t next = 0;
  rounds put, get;
  for (int turn = -1; turn < (quick ? 3 : 7); ++turn) {
    cluster.spin(true);
    const auto first = next;
    next += static_cast<std::uint64_t>(what.count);
    const auto key = [&](int i) {
      return std::string{"k"}.append(std::to_string(first + static_cast<unsigned>(i)));
    };
    const auto p =
        median_of(what.count, [&](int i) { outcome_of(node.put("prefill-0", key(i), bytes)); });
    const auto g = median_of(what.count, [&](int i) {
      outcome_of(node.get("prefill-0", key(i)));
      if (cluster.last_value.bytes.size() != what.bytes) die("a value came back short");
      cluster.last_value = {};
    });
    for (int i = 0; i < what.count; ++i) outcome_of(node.remove("prefill-0", key(i)));
    cluster.spin(false);
    const auto rival = bare.exchange(what.bytes, what.count);
    if (turn < 0) continue;  // the first round warms up
    put.add(p, rival);
    get.add(g, rival);
  }
  const auto rest = std::string{" "} + what.name + ", " + how.name() + ", vs bare TCP exchange";
  give_cost(parent, {std::string{"put"}.append(rest), put.ours(), put.rival(), what.wanted, "us"});
  give_cost(parent, {std::string{"get"}.append(rest), get.ours(), get.rival(), what.wanted, "us"});
}

void values(const control& parent, const way& how) {
  bare_socket bare{how.polling};
  bench_cluster cluster{{.backend = how.backend, .polling = how.polling}};
  values_of(parent, how, {3305, "3,305 B", 3.0, quick ? 100 : 300}, cluster, bare);
  values_of(parent, how, {1'600'000, "1.6 MB", 1.5, quick ? 10 : 20}, cluster, bare);
}

// -- transfers

/// Microseconds per transfer of `count` at once.
double all_at_once(bench_cluster& cluster, transfer_mode mode, std::uint64_t first, int count) {
  cluster.offer(first, static_cast<std::uint64_t>(count));
  const auto before = cluster.done;
  const auto start = clock_type::now();
  for (int i = 0; i < count; ++i) {
    cluster.receive(first + static_cast<std::uint64_t>(i), mode, static_cast<std::uint32_t>(i));
  }
  cluster.until_done(before + static_cast<std::uint64_t>(count));
  const auto each = microseconds_since(start) / count;
  cluster.until_unpinned(cluster.done);
  cluster.drain();
  return each;
}

void transfers(const control& parent, const way& how, transfer_mode mode) {
  const auto kind =
      how.backend == "shm" ? transport::backend_kind::shm : transport::backend_kind::tcp;
  bare_link bare{kind, how.polling};
  bench_cluster cluster{{.backend = how.backend, .polling = how.polling}};
  const int count = quick ? 100 : 300;
  constexpr int many = 1000;
  std::uint64_t next = 0;
  rounds one, thousand;
  for (int turn = -1; turn < (quick ? 3 : 7); ++turn) {
    cluster.spin(true);
    const auto single = cluster.one_by_one(mode, next, count);
    next += static_cast<std::uint64_t>(count);
    cluster.spin(false);
    const auto bare_single = bare.post(segments_per_block, segment_bytes, count);
    cluster.spin(true);
    const auto each = all_at_once(cluster, mode, next, many);
    next += many;
    cluster.spin(false);
    const auto bare_each = bare.post_many(segments_per_block, segment_bytes, many);
    if (turn < 0) continue;
    one.add(single, bare_single);
    thousand.add(each, bare_each);
  }
  const double limit = how.polling ? 20 : 60;
  const auto name =
      std::string{mode == transfer_mode::write ? "write" : "read"} + " mode, " + how.name();
  const auto detail = [](const rounds& r) {
    char text[96];
    std::snprintf(text, sizeof text, "(transfer %.1f us, bare link %.1f us)", r.ours(), r.rival());
    return std::string{text};
  };
  give_cost(parent,
            {"actor cost of a transfer, " + name + ", vs limit", one.ours() - one.rival(), limit,
             1.0, "us"},
            detail(one));
  give_cost(parent,
            {"actor cost of each of 1,000 transfers, " + name + ", vs limit",
             thousand.ours() - thousand.rival(), limit, 2.0, "us"},
            detail(thousand));
}

// -- idle transfers and nodes

void idle_memory(const control& parent, const std::string& backend) {
  bench_cluster cluster{{.backend = backend}};
  std::uint64_t next = 0;
  const auto start_idle = [&](std::uint64_t count) {
    cluster.offer(next, count, false);
    for (const auto end = next + count; next < end; ++next) {
      cluster.receive(next, transfer_mode::write, static_cast<std::uint32_t>(next % pool_blocks));
    }
    std::this_thread::sleep_for(500ms);
  };
  start_idle(200);
  const auto mine = resident_bytes();
  const auto theirs = cluster.peer_resident();
  constexpr std::uint64_t many = 2000;
  start_idle(many);
  const auto grown = [&](std::uint64_t now, std::uint64_t before) {
    return (static_cast<double>(now) - static_cast<double>(before)) / 1024.0 / many;
  };
  give_cost(parent,
            {std::string{"memory of an idle receive, "}.append(backend).append(", vs limit"),
             grown(resident_bytes(), mine), 16, 1.0, "KiB"});
  give_cost(parent, {std::string{"memory of an idle send, "}.append(backend).append(", vs limit"),
                     grown(cluster.peer_resident(), theirs), 16, 1.0, "KiB"});
}

void idle_processor(const control& parent, const std::string& backend) {
  bench_cluster cluster{{.backend = backend}};
  cluster.offer(0, 10);
  for (std::uint32_t i = 0; i < 10; ++i) cluster.receive(i, transfer_mode::write, i);
  cluster.until_unpinned(10);
  std::this_thread::sleep_for(1s);
  const auto time = quick ? 3s : 10s;
  const auto before = processor_seconds();
  std::this_thread::sleep_for(time);
  const auto share = (processor_seconds() - before) / static_cast<double>(time.count()) * 100;
  give_cost(parent, {"processor of an idle node with a link, " + backend + ", vs limit", share, 1,
                     1.0, "%"});
}

void soak(const control& parent, const std::string& backend) {
  bench_cluster cluster{{.backend = backend}};
  const std::uint64_t total = quick ? 20'000 : 100'000;
  constexpr std::uint64_t window = 16;
  constexpr std::uint64_t offered = 500;
  std::uint64_t mine = 1;
  std::uint64_t theirs = 1;
  for (std::uint64_t next = 0; next < total; next += offered) {
    if (next == 1000) {
      mine = resident_bytes();
      theirs = cluster.peer_resident();
    }
    cluster.offer(next, offered);
    for (auto i = next; i < next + offered; ++i) {
      if (i >= window) cluster.until_unpinned(i - window + 1);
      cluster.receive(i, i % 2 == 0 ? transfer_mode::write : transfer_mode::read,
                      static_cast<std::uint32_t>(i % offered));
    }
    cluster.until_unpinned(next + offered);
    cluster.drain();
    if ((next + offered) % 10'000 == 0) {
      std::fprintf(stderr, "  after %llu transfers: %llu KiB and %llu KiB\n",
                   static_cast<unsigned long long>(next + offered),
                   static_cast<unsigned long long>(resident_bytes() / 1024),
                   static_cast<unsigned long long>(cluster.peer_resident() / 1024));
    }
  }
  const auto name = std::to_string(total / 1000) + ",000 transfers in a row, " + backend;
  const auto mib = [](std::uint64_t bytes) { return static_cast<double>(bytes) / (1 << 20); };
  give_cost(parent, {"decode memory after " + name + ", vs after 1,000", mib(resident_bytes()),
                     mib(mine), 1.05, "MiB"});
  give_cost(parent, {"prefill memory after " + name + ", vs after 1,000",
                     mib(cluster.peer_resident()), mib(theirs), 1.05, "MiB"});
}

}  // namespace

int main(int argc, char** argv) {
  const std::set<std::string> known{"values", "transfers", "memory", "idle", "soak"};
  std::set<std::string> wanted;
  std::vector<std::string> backends{"shm", "tcp"};
  std::vector<bool> styles{false, true};
  for (int i = 1; i < argc; ++i) {
    const std::string word{argv[i]};
    if (word == "--quick") {
      quick = true;
    } else if (word == "--backend" && i + 1 < argc) {
      backends = {argv[++i]};
    } else if (word == "--polling") {
      styles = {true};
    } else if (word == "--events") {
      styles = {false};
    } else if (known.contains(word)) {
      wanted.insert(word);
    } else {
      std::fputs(
          "usage: actors_bench [--quick] [--backend shm|tcp] [--polling|--events] "
          "[values|transfers|memory|idle|soak ...]\n",
          stderr);
      return 2;
    }
  }
  const auto want = [&](const char* name) { return wanted.empty() || wanted.contains(name); };
  std::vector<std::string> rows;
  const auto run = [&](const std::function<void(const control&)>& body) {
    for (auto& r : part(body)) rows.push_back(std::move(r));
  };
  for (const auto& backend : backends) {
    for (const bool polling : styles) {
      const way how{backend, polling};
      if (want("values")) run([&](const control& c) { values(c, how); });
      if (!want("transfers")) continue;
      run([&](const control& c) { transfers(c, how, transfer_mode::write); });
      run([&](const control& c) { transfers(c, how, transfer_mode::read); });
    }
    if (want("memory")) run([&](const control& c) { idle_memory(c, backend); });
    if (want("idle")) run([&](const control& c) { idle_processor(c, backend); });
    if (want("soak")) run([&](const control& c) { soak(c, backend); });
  }
  print(rows);
}
