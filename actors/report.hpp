#pragma once

/// What a node owns and does. Used in cluster messages and by engines.

#include <cstdint>
#include <string>
#include <vector>

#include "troupe/actors/node_info.hpp"

namespace troupe::actors {

/// A lane that is a queue pair of a device.
struct lane_report {
  std::string device;
  std::uint32_t port{0};
  std::uint32_t gid_index{0};
  std::string gid;
  std::uint64_t requests_posted{0}, requests_completed{0}, bytes{0};
  std::uint8_t port_up{1};        ///< as the device last reported
  std::uint32_t port_downs{0};    ///< how often the port went down since the node started
  std::uint32_t port_changes{0};  ///< how often its addresses or partition keys changed since then
  /// How often the port (not only this lane) has retransmitted since the link was last made;
  /// negative: its driver does not count that.
  std::int64_t port_retries{-1};
};

struct link_report {
  std::string peer;
  std::uint64_t peer_incarnation{0};
  std::string backend;  ///< empty: none chosen yet
  std::string reason;
  std::string state;  ///< connecting, up, rebuilding, broken
  std::uint32_t lanes{0};
  std::uint64_t bytes_out{0}, bytes_in{0}, in_flight{0}, refused{0};  ///< since it was last made
  std::uint32_t rebuilds{0};                         ///< how often it broke and was rebuilt
  std::string last_break;                            ///< why it last broke; empty: never
  std::uint64_t posted{0}, completed{0}, failed{0};  ///< this end's batches since then
  std::vector<lane_report> by_lane;                  ///< empty if the lanes are no queue pairs
};

struct transfer_report {
  std::uint64_t transfer{0};
  std::string request;
  std::string peer;
  std::string side;  ///< send, receive, put and so on; `held`: a decode rank holds a source here
  std::string state;
  std::uint64_t bytes{0};
  std::uint32_t age_ms{0};
};

struct pool_report {
  std::string device;
  std::uint64_t bytes{0}, block_bytes{0};
  std::uint64_t blocks_total{0}, blocks_free{0}, blocks_quarantined{0}, waiting{0};
  std::uint64_t store_bytes{0}, store_used{0}, store_keys{0};
  std::string
      memory{};  ///< host memory: what the cache is made of, "huge pages of 2 MiB, NUMA node 0"
};

/// A way to move bytes, and whether this node can use it now.
struct backend_report {
  std::string name;
  std::uint8_t usable{0};
  std::string reason;  ///< why not; if usable, what it relies on
};

/// Receives of one peer whose request this node does not know yet.
struct parked_report {
  std::string peer;
  std::uint32_t receives{0};
};

struct node_report {
  node_info node;
  std::uint64_t epoch{0};  ///< of the last membership seen
  bool supervisor_reachable{false};
  std::uint64_t uptime_ms{0};
  pool_report pool;
  std::vector<backend_report> backends;
  std::vector<link_report> links;
  std::vector<transfer_report> transfers;
  std::uint64_t transfers_done{0}, transfers_failed{0}, bytes_moved{0};
  std::uint64_t operations_open{0};   ///< of the engine; open until it has taken the last event
  std::uint64_t waiting_for_link{0};  ///< operations that wait for a link with their peer
  std::vector<parked_report> parked;  ///< by peer; each has at most `limits.max_parked`
};

// -- inspection

template <class I>
auto inspect(I& f, lane_report& x) {
  return f(x.device, x.port, x.gid_index, x.gid, x.requests_posted, x.requests_completed, x.bytes,
           x.port_up, x.port_downs, x.port_changes, x.port_retries);
}
template <class I>
auto inspect(I& f, link_report& x) {
  return f(x.peer, x.peer_incarnation, x.backend, x.reason, x.state, x.lanes, x.bytes_out,
           x.bytes_in, x.in_flight, x.refused, x.rebuilds, x.last_break, x.posted, x.completed,
           x.failed, x.by_lane);
}
template <class I>
auto inspect(I& f, transfer_report& x) {
  return f(x.transfer, x.request, x.peer, x.side, x.state, x.bytes, x.age_ms);
}
template <class I>
auto inspect(I& f, pool_report& x) {
  return f(x.device, x.bytes, x.block_bytes, x.blocks_total, x.blocks_free, x.blocks_quarantined,
           x.waiting, x.store_bytes, x.store_used, x.store_keys, x.memory);
}
template <class I>
auto inspect(I& f, backend_report& x) {
  return f(x.name, x.usable, x.reason);
}
template <class I>
auto inspect(I& f, parked_report& x) {
  return f(x.peer, x.receives);
}
template <class I>
auto inspect(I& f, node_report& x) {
  return f(x.node, x.epoch, x.supervisor_reachable, x.uptime_ms, x.pool, x.backends, x.links,
           x.transfers, x.transfers_done, x.transfers_failed, x.bytes_moved, x.operations_open,
           x.waiting_for_link, x.parked);
}

}  // namespace troupe::actors
