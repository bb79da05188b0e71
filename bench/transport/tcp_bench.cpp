// Rows of the tcp backend: each measures ours and a bare socket pair that does the same work, in
// turns, in the same two processes. Prints a JSON array of {name, ours, rival, ratio, unit, wanted,
// better}; `wanted` is null in a row without a limit.
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <unistd.h>

#include "processes.hpp"
#include "rows.hpp"
#include "sockets.hpp"
#include "tcp_bare.hpp"
#include "tcp_ours.hpp"

namespace {

using namespace troupe::bench;
using troupe::transport::direction;
using troupe::transport::link_role;

int rounds = 7;
int latency_rounds = 1000;

}  // namespace

int main(int argc, char** argv) {
  std::uint32_t lanes = 1;
  std::string_view only;  // write or read: ours alone, for a rival that another program runs
  std::vector<std::size_t> blocks{65'536, 16'384, 4'096};
  for (int i = 1; i < argc; ++i) {
    if (std::string_view{argv[i]} == "--lanes" && i + 1 < argc) {
      lanes = static_cast<std::uint32_t>(std::strtoul(argv[++i], nullptr, 10));
    } else if (std::string_view{argv[i]} == "--only" && i + 2 < argc) {
      only = argv[++i];
      blocks = {std::strtoul(argv[++i], nullptr, 10)};
    } else if (std::string_view{argv[i]} == "--latency") {
      blocks.clear();
    } else if (std::string_view{argv[i]} == "--quick") {
      rounds = 3;
      latency_rounds = 200;
    } else {
      std::fprintf(
          stderr, "usage: tcp_bench [--lanes N] [--quick] [--latency] [--only write|read BLOCK]\n");
      return 2;
    }
  }
  const auto our_peer = fork_child([&](const control& c) { our_child(c, lanes); });
  const auto [mine, theirs] = connected_sockets();
  const auto bare_peer = fork_child([fd = theirs](const control& c) { bare_stream{fd}.serve(c); });
  ::close(theirs);
  auto n = tcp_node(our_peer, link_role::initiator, lanes, 1);
  auto polled = tcp_node(our_peer, link_role::initiator, lanes, 0);
  bare_stream bare{mine};

  const auto ours = [&](const std::function<double()>& measure) {
    our_peer.put('s');
    const auto value = measure();
    our_peer.put('e');
    our_peer.get<char>();
    return value;
  };

  std::vector<row> rows;
  if (!only.empty()) {
    const auto dir = only == "write" ? direction::write : direction::read;
    (void)our_throughput(n, dir, blocks[0]);  // warms up
    rows.push_back(
        {"tcp " + std::string{only}, our_throughput(n, dir, blocks[0]), 1, 0, "GB/s", false});
    print(rows);
    std::fflush(stdout);
    std::_Exit(0);
  }
  for (const auto block : blocks) {
    std::vector<double> w, r, bw, br;
    for (int i = -1; i < rounds; ++i) {  // the first round warms up
      const auto ow = our_throughput(n, direction::write, block);
      const auto rw = bare.throughput(bare_peer, direction::write, block);
      const auto orr = our_throughput(n, direction::read, block);
      const auto rr = bare.throughput(bare_peer, direction::read, block);
      if (i < 0) continue;
      w.push_back(ow);
      bw.push_back(rw);
      r.push_back(orr);
      br.push_back(rr);
    }
    const auto size = std::to_string(block / 1024) + " KiB";
    const double wanted = block == 4096 ? 0.8 : 0.95;
    rows.push_back({"tcp write " + size + " x 256 vs bare writev/readv", median(w), median(bw),
                    wanted, "GB/s", false});
    rows.push_back({"tcp read " + size + " x 256 vs bare writev/readv", median(r), median(br),
                    wanted, "GB/s", false});
    rows.push_back({"tcp read vs write " + size, median(r), median(w), 0.9, "GB/s", false});
  }
  std::vector<double> lat, bare_lat;
  for (int i = -1; i < rounds; ++i) {
    const auto o = ours([&] { return our_latency(polled, latency_rounds); });
    const auto l = bare.latency(bare_peer, latency_rounds);
    if (i < 0) continue;
    lat.push_back(o);
    bare_lat.push_back(l);
  }
  const auto one_way = median(lat);
  const auto bare_way = median(bare_lat);
  rows.push_back({"tcp 4 KiB write until the target has its notice, vs bare 4 KiB there and back",
                  one_way, 2 * bare_way, 1.3, "us", true});
  rows.push_back({"tcp 4 KiB write with notice there and back, vs bare 4 KiB there and back",
                  2 * one_way, 2 * bare_way, std::nullopt, "us", true});
  print(rows);
  std::fflush(stdout);
  std::_Exit(0);
}
