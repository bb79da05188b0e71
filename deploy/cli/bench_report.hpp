#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>

#include "troupe/actors/cluster_messages.hpp"
#include "troupe/deploy/cli/bench_options.hpp"
#include "troupe/deploy/cli/bench_receiver.hpp"

namespace troupe::deploy::cli {

/// A finished bench, ready to print.
struct bench_report {
  bench_options options;
  std::string supervisor;          ///< its address for `troupe status` while it runs
  std::uint64_t request_bytes{0};  ///< moved by one transfer
  bench_outcome outcome;
  actors::link_report link;  ///< of the decode node to the prefill node
};

/// "3.21 GB/s" (1e9 bytes)
[[nodiscard]] std::string throughput_text(const bench_outcome& outcome);
/// Prints the load that is about to run.
void print_head(const bench_report& planned, std::ostream& out);
void print_results(const bench_report& report, std::ostream& out);
/// Times in microseconds, throughput in bytes per second.
[[nodiscard]] std::string to_json(const bench_report& report);

}  // namespace troupe::deploy::cli
