// Rows of the rdma backend. Each measures ours and a tool of perftest that does the same work over
// the same devices, in turns. Prints a JSON array of {name, ours, rival, ratio, unit, wanted,
// better}. Needs devices: bench/run starts it in the machine of tests/verbs.
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <unistd.h>

#include "processes.hpp"
#include "rdma_ours.hpp"
#include "rows.hpp"

namespace {

using namespace troupe::bench;
using troupe::transport::direction;

constexpr std::uint64_t KiB = 1024;
constexpr std::uint64_t MiB = 1024 * KiB;

struct settings {
  std::string rival;  ///< tests/verbs/perftest; empty: ours alone
  std::string only;   ///< part of the names of the rows that are measured
  int rounds{5};
  int turns{1000};  ///< of a round of latency
  rdma_places places{.near = "rxe0b", .far = "rxe0a"};
};

/// A bandwidth row and its rival.
struct bandwidth {
  const char* name;
  rdma_work work;
  double wanted;
};

constexpr auto wr = direction::write;
constexpr auto rd = direction::read;
const std::array bandwidths{
    bandwidth{"write 64 KiB x 64, one after the other, vs ib_write_bw 64 KiB",
              {wr, 64 * KiB, 0, 32 * MiB},
              1.0},
    bandwidth{"read 64 KiB x 64, one after the other, vs ib_read_bw 64 KiB",
              {rd, 64 * KiB, 0, 32 * MiB},
              1.0},
    bandwidth{"write 64 KiB x 64, each by itself, vs ib_write_bw 64 KiB",
              {wr, 64 * KiB, 1, 32 * MiB},
              1.0},
    bandwidth{
        "read 64 KiB x 64, each by itself, vs ib_read_bw 64 KiB", {rd, 64 * KiB, 1, 32 * MiB}, 1.0},
    bandwidth{"write 1 MiB x 64 vs ib_write_bw 1 MiB", {wr, 1 * MiB, 1, 64 * MiB}, 1.0},
    bandwidth{"read 1 MiB x 64 vs ib_read_bw 1 MiB", {rd, 1 * MiB, 1, 64 * MiB}, 1.0},
    bandwidth{
        "write 16 KiB x 64 in runs of 4 vs ib_write_bw 64 KiB", {wr, 16 * KiB, 4, 32 * MiB}, 1.0},
    bandwidth{"write 16 KiB x 64, none next to another, vs ib_write_bw 16 KiB",
              {wr, 16 * KiB, 1, 32 * MiB},
              0.95},
    bandwidth{"read 16 KiB x 64, none next to another, vs ib_read_bw 16 KiB",
              {rd, 16 * KiB, 1, 32 * MiB},
              0.95},
};

/// One run of a tool: MB/s or microseconds. Empty if it measured nothing this time.
std::optional<double> rival_of(const settings& with, const char* tool, std::uint64_t bytes,
                               std::uint64_t count) {
  const auto command =
      with.rival + " " + tool + " " + std::to_string(bytes) + " 1 -n " + std::to_string(count);
  auto* pipe = ::popen(command.c_str(), "r");  // NOLINT(bugprone-command-processor): ours
  if (pipe == nullptr) die("cannot start " + command);
  double figure = 0;
  const int got = std::fscanf(pipe, "%*s %*s %lf", &figure);
  const int status = ::pclose(pipe);
  if (status != 0 || got != 1) return std::nullopt;
  return figure;
}

class measurement {
 public:
  measurement(const settings& with, const control& peer)
      : with_{with},
        peer_{peer},
        busy_{rdma_node(peer, with.places, 1)},
        polled_{rdma_node(peer, with.places, 0)} {}

  template <class Ours>
  void row_of(const std::string& name, const char* tool, std::uint64_t bytes, std::uint64_t count,
              row made, const Ours& ours) {
    if (name.find(with_.only) == std::string::npos) return;
    std::vector<double> mine, theirs;
    static_cast<void>(ours());  // warms up
    int missing = 0;
    while (static_cast<int>(mine.size()) < with_.rounds) {
      const auto value = ours();
      if (with_.rival.empty()) {
        theirs.push_back(1);
      } else if (const auto rival = rival_of(with_, tool, bytes, count)) {
        theirs.push_back(*rival);
      } else if (++missing > with_.rounds) {
        die(std::string{tool} + " measures nothing here");
      } else {
        continue;
      }
      mine.push_back(value);
    }
    made.name = "rdma " + name;
    made.ours = median(mine);
    made.rival = median(theirs);
    std::fprintf(stderr, "%-76s %8.2f %8.2f  %5.2f |", made.name.c_str(), made.ours, made.rival,
                 made.ours / made.rival);
    for (std::size_t i = 0; i < mine.size(); ++i) {
      std::fprintf(stderr, " %.1f/%.1f", mine[i], theirs[i]);
    }
    std::fprintf(stderr, "\n");
    rows_.push_back(std::move(made));
  }

  void bandwidth_row(const bandwidth& which) {
    const auto& work = which.work;
    // One request of the rival moves what we merge into one.
    const auto message = work.block * std::max<std::uint64_t>(work.neighbours, 1);
    row_of(which.name, work.dir == wr ? "ib_write_bw" : "ib_read_bw", message, work.bytes / message,
           {.name = {}, .wanted = which.wanted, .unit = "MB/s", .lower_is_better = false},
           [&] { return rdma_throughput(busy_, work); });
  }

  void latency_row() {
    row_of("write 8 B until the target has its notice (p50) vs ib_write_lat 8 B, one way each",
           "ib_write_lat", 8, 2000,
           {.name = {}, .wanted = 1.3, .unit = "us", .lower_is_better = true}, [&] {
             peer_.put('s');
             const auto value = rdma_latency(polled_, with_.turns);
             peer_.put('e');
             peer_.get<char>();
             return value;
           });
  }

  [[nodiscard]] const std::vector<row>& rows() const noexcept { return rows_; }

 private:
  const settings& with_;
  const control& peer_;
  link_node busy_;    ///< sleeps when it has nothing to do
  link_node polled_;  ///< by us
  std::vector<row> rows_;
};

settings read_arguments(int argc, char** argv) {
  settings with;
  for (int i = 1; i < argc; ++i) {
    const std::string_view name{argv[i]};
    const auto value = [&]() -> const char* {
      if (i + 1 == argc) die("no value for " + std::string{name});
      return argv[++i];
    };
    if (name == "--rival") {
      with.rival = value();
    } else if (name == "--only") {
      with.only = value();
    } else if (name == "--rounds") {
      with.rounds = std::max(1, std::atoi(value()));
    } else if (name == "--turns") {
      with.turns = std::max(1, std::atoi(value()));
    } else if (name == "--lanes") {
      with.places.lanes = static_cast<std::uint32_t>(std::max(1, std::atoi(value())));
    } else if (name == "--near") {
      with.places.near = value();
    } else if (name == "--far") {
      with.places.far = value();
    } else {
      die("usage: rdma_bench [--rival PROGRAM] [--only PART_OF_A_NAME] [--rounds N] [--turns N] "
          "[--lanes N] [--near DEVICE] [--far DEVICE]");
    }
  }
  return with;
}

}  // namespace

int main(int argc, char** argv) {
  const auto with = read_arguments(argc, argv);
  const auto peer = fork_child([&](const control& c) { rdma_child(c, with.places); });
  measurement all{with, peer};
  for (const auto& which : bandwidths) all.bandwidth_row(which);
  all.latency_row();
  print(all.rows());
  std::fflush(stdout);
  std::_Exit(0);
}
