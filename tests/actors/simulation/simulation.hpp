#pragma once

/// A whole cluster in one thread, under virtual time. The supervisor's membership table and router
/// are the real ones, as are each node's block pool and the state machines of both sides of its
/// transfers. Processes, the network between them and the engines are simulated, with their
/// failures: processes die, return and freeze (which is also how a clock jump looks); connections
/// are delayed, stall and break; two nodes, or the supervisor and some nodes, cannot reach each
/// other for a while; a NIC goes on writing for a process that is frozen or dead, and delivers
/// twice. Invariants are checked after every event. The same options give the same run.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "troupe/kvcache/errc.hpp"

#include "shrink.hpp"

namespace troupe::actors::cluster_simulation {

/// One fault of a run: its time and every number that was drawn for it.
struct drawn_fault {
  std::chrono::microseconds after_begin{0};
  std::vector<std::uint64_t> draws;
  bool happens{true};  ///< if false, its numbers are drawn but unused: later faults keep theirs
};

struct options {
  std::uint64_t seed{1};
  std::uint32_t prefills{20};
  std::uint32_t decodes{20};
  std::uint32_t requests{2000};
  double requests_per_second{200};
  double faults_per_second{2};
  std::uint32_t blocks{64};  ///< of each node's pool
  /// Keep the last lines of the trace, for a run that is examined.
  bool traced{false};
  std::size_t trace_lines{400};

  // -- for a reduced run (shrink.hpp)

  /// Faults of a former run, used instead of drawing new ones.
  std::optional<std::vector<drawn_fault>> faults;
  std::set<std::uint32_t> absent_nodes;      ///< nodes that never start
  std::set<std::uint32_t> unasked_requests;  ///< requests that are never made
  /// The run ends after this virtual time.
  std::optional<std::chrono::microseconds> at_most;
};

/// A handful of nodes, 600 requests, and more faults than any cluster should see.
[[nodiscard]] options small(std::uint64_t seed);
/// A thousand nodes.
[[nodiscard]] options large(std::uint64_t seed);

struct report {
  std::string violation;  ///< the first invariant that did not hold; empty if all held
  std::uint64_t events{0};
  std::uint64_t digest{0};  ///< of all events, in order
  std::chrono::microseconds virtual_time{0};
  std::uint64_t done{0};    ///< requests
  std::uint64_t failed{0};  ///< requests that failed with a reason after their last attempt
  std::uint64_t attempts{0};
  std::map<errc, std::uint64_t> reasons;  ///< of failed attempts
  std::map<std::string, std::uint64_t> faults;
  std::set<std::string> met;          ///< which kinds of fault hit which role
  std::uint64_t placed_once_more{0};  ///< requests placed again under their id: nodes were lost
  std::uint64_t lapses{0};            ///< leases that lapsed because their holder is dead
  std::uint64_t rebuilds{0};          ///< links that broke and were rebuilt
  std::uint64_t refused_late{0};      ///< batches that arrived after a fence and were refused
  std::uint64_t epochs{0};            ///< the last epoch
  std::vector<drawn_fault> drawn_faults;
  std::string trace;
};

/// The invariant that the violation is about, without the names and numbers of this run.
[[nodiscard]] std::string kind_of(const std::string& violation);

[[nodiscard]] report run(const options& of);

[[nodiscard]] troupe::testing::shrinkable<options, report> whole();

}  // namespace troupe::actors::cluster_simulation
