#pragma once

/// A whole cluster in one thread, under virtual time: the supervisor's membership table and router,
/// and of every node the block pool and both sides' state machines of its transfers, all of them the
/// real ones. Processes, the network between them and the engines are simulated, and do all that
/// such do: processes die, return, stand still (which is also what a clock that jumps looks like);
/// connections delay, stall and break; two nodes, or the supervisor and some of them, cannot reach
/// each other for a while; a NIC goes on writing for a process that stands still or has died, and
/// delivers twice. Invariants are checked after every event. The same options run the same way again.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "troupe/kvcache/errc.hpp"

namespace troupe::actors::cluster_simulation {

/// One fault of a run: when it came, and every number that was drawn for it.
struct drawn_fault {
  std::chrono::microseconds after_begin{0};
  std::vector<std::uint64_t> draws;
  bool happens{true};  ///< false: only its numbers are drawn, so that the others keep theirs
};

struct options {
  std::uint64_t seed{1};
  std::uint32_t prefills{20};
  std::uint32_t decodes{20};
  std::uint32_t requests{2000};
  double requests_per_second{200};
  double faults_per_second{2};
  std::uint32_t blocks{64};  ///< of each node's pool
  /// The last lines of what happened, for a run that is looked at again.
  bool traced{false};
  std::size_t trace_lines{400};

  // -- for a run that is cut down (shrink.hpp)

  /// Faults of a former run, instead of drawing them.
  std::optional<std::vector<drawn_fault>> faults;
  std::set<std::uint32_t> absent_nodes;      ///< they never start
  std::set<std::uint32_t> unasked_requests;  ///< they are never asked for
  /// What comes later is not waited for.
  std::optional<std::chrono::microseconds> at_most;
};

/// A handful of nodes, 600 requests, and more faults than any cluster should see.
[[nodiscard]] options small(std::uint64_t seed);
/// A thousand nodes.
[[nodiscard]] options large(std::uint64_t seed);

struct report {
  std::string violation;  ///< of the first invariant that did not hold; empty: all did
  std::uint64_t events{0};
  std::uint64_t digest{0};  ///< of all that happened, in order
  std::chrono::microseconds virtual_time{0};
  std::uint64_t done{0};    ///< requests
  std::uint64_t failed{0};  ///< with a reason, after as many attempts as they have
  std::uint64_t attempts{0};
  std::map<errc, std::uint64_t> reasons;  ///< of attempts that failed
  std::map<std::string, std::uint64_t> faults;
  std::set<std::string> met;          ///< which fault of a node met which role
  std::uint64_t placed_once_more{0};  ///< under the id that it had, since nodes of it were lost
  std::uint64_t lapses{0};            ///< holds whose holder does not live
  std::uint64_t rebuilds{0};          ///< links that broke and were made again
  std::uint64_t refused_late{0};      ///< batches that came behind a fence, and were refused by it
  std::uint64_t epochs{0};            ///< the last one
  std::vector<drawn_fault> drawn_faults;
  std::string trace;
};

/// The invariant that a violation is of, without the names and numbers of this run.
[[nodiscard]] std::string kind_of(const std::string& violation);

[[nodiscard]] report run(const options& of);

}  // namespace troupe::actors::cluster_simulation
