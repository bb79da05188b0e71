#pragma once

/// A whole cluster in one thread, under virtual time: the supervisor's membership table and router,
/// and of every node the block pool and both sides' state machines of its transfers, all of them the
/// real ones. Processes, the network between them and the engines are simulated, and do all that
/// such do: processes die, return, stand still (which is also what a clock that jumps looks like);
/// connections delay, stall and break; two nodes, or the supervisor and some of them, cannot reach
/// each other for a while; a NIC goes on writing for a process that stands still or has died, and
/// delivers twice. Invariants are checked after every event. The same options run the same way again.

#include <chrono>
#include <cstdint>
#include <map>
#include <string>

#include "troupe/kvcache/errc.hpp"

namespace troupe::actors::cluster_simulation {

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
};

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
  std::uint64_t placed_once_more{0};  ///< under the id that it had, since nodes of it were lost
  std::uint64_t lapses{0};            ///< holds whose holder does not live
  std::uint64_t rebuilds{0};          ///< links that broke and were made again
  std::uint64_t refused_late{0};      ///< batches that came behind a fence, and were refused by it
  std::uint64_t epochs{0};            ///< the last one
  std::string trace;
};

[[nodiscard]] report run(const options& of);

}  // namespace troupe::actors::cluster_simulation
