#pragma once

/// The structs that cross CAF's own network layer: registration, heartbeats, membership, placement,
/// link offers, status. Plain data. Enums travel as their numbers and are range-checked by whoever
/// receives them
/// (`is_node_state` and so on): CAF does not. A reply that can fail carries `failed` and
/// `sentence`.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "troupe/config/transfer_mode.hpp"
#include "troupe/kvcache/errc.hpp"
#include "troupe/kvcache/layout_fingerprint.hpp"

namespace troupe::actors {

/// Raised by every change of a cluster or session message; compared before the first byte.
inline constexpr std::uint32_t protocol_version = 13;

using bytes = std::vector<std::uint8_t>;

enum class node_role : std::uint8_t { supervisor = 1, prefill, decode, store, both };
enum class node_state : std::uint8_t { joining = 1, up, suspect, down, leaving };
[[nodiscard]] std::string_view to_string(node_role role) noexcept;
[[nodiscard]] std::string_view to_string(node_state state) noexcept;
[[nodiscard]] std::optional<node_role> node_role_from(std::uint8_t number) noexcept;
[[nodiscard]] std::optional<node_state> node_state_from(std::uint8_t number) noexcept;

/// What a node of an open stage is known by outside of Troupe: an engine's id, the address of its
/// HTTP server. Compared with nothing; `cluster_client::find_label` looks for it.
struct node_label {
  std::string key;
  std::string value;
  friend bool operator==(const node_label&, const node_label&) = default;
};
inline constexpr std::size_t max_labels = 16;
inline constexpr std::size_t max_label_key = 64;      ///< bytes, at least 1
inline constexpr std::size_t max_label_value = 256;   ///< bytes
inline constexpr std::size_t max_label_bytes = 1024;  ///< of all keys and values of a node

/// Who a node is and where it can be reached.
struct node_info {
  std::string name;  ///< of the deployment, e.g. `decode-1-0`, or of an open stage, `engines.a.0`
  std::string stage;
  std::uint8_t role{0};      ///< `node_role`
  std::uint32_t replica{0};  ///< assigned by the supervisor; meaningless before
  /// Within the replica, and how many that has: of P parts of T tensor-parallel ranks P * T, where
  /// tensor-parallel rank t of part p is p * T + t.
  std::uint32_t rank{0};
  std::uint32_t ranks{1};
  std::string host;
  std::uint16_t port{0};  ///< the cluster port that was really bound
  std::uint64_t incarnation{0};
  std::uint32_t pid{0};
  /// Where its process runs, as `transport::host_identity` says it: whoever dials the node knows
  /// before that which backends are for one host only. Empty: it does not know.
  std::string boot_id{};
  std::uint64_t network_namespace{0};
  std::uint64_t pid_namespace{0};
  std::uint64_t user_namespace{0};
  std::uint32_t uid{0};
  // Of nodes of open stages only:
  std::string replica_name{};                 ///< the engine's own id, the same of all its ranks
  kvcache::layout_fingerprint fingerprint{};  ///< of its layout; all zero: not said, fits any
  std::vector<node_label> labels{};
};
/// What is wrong with the labels of a node. Empty: nothing.
[[nodiscard]] std::optional<std::string> wrong_labels(const std::vector<node_label>& labels);
/// Whether a node may say this of its host: empty, or hex digits and dashes.
[[nodiscard]] bool is_boot_id(std::string_view text) noexcept;

struct registration_request {
  std::uint32_t version{protocol_version};
  std::string cluster;
  node_info node;
  std::uint32_t wanted_replica{0};  ///< of the deployment's slot; the supervisor decides
  std::uint8_t join{0};             ///< 1: a node that no file names, into an open stage
};

struct registration {
  std::uint8_t failed{0};
  std::string sentence;
  std::uint32_t replica{0};
  std::uint64_t epoch{0};
  std::uint64_t supervisor_incarnation{0};
  std::uint32_t heartbeat_interval_ms{1000};
};

/// What a node says of itself with every heartbeat.
struct load_report {
  std::uint32_t queue_length{0};  ///< requests waiting or running in the engine and the pool's line
  std::uint32_t active_transfers{0};
  std::uint64_t blocks_total{0};
  std::uint64_t blocks_free{0};
  std::uint64_t blocks_quarantined{0};
  std::uint32_t links_up{0};
  std::uint32_t links_broken{0};  ///< being made again
};

struct heartbeat {
  std::string name;
  std::uint64_t incarnation{0};
  std::uint64_t sequence{0};
  load_report load;
  std::string failure;     ///< why the node can serve nobody; empty: it can
  std::uint64_t epoch{0};  ///< of the newest membership that it has
};

struct heartbeat_ack {
  bool known{false};  ///< false: register again
  std::uint64_t epoch{0};
  std::uint64_t supervisor_incarnation{0};
};

struct member {
  node_info node;
  std::uint8_t state{0};  ///< `node_state`
  load_report load;
  std::string reason;  ///< why it is in that state
  /// When this life was taken in, or taken in again after it had been down. What was placed on it
  /// before is void.
  std::uint64_t registered{0};
};

/// The whole truth of the supervisor at one epoch.
struct membership {
  std::string cluster;
  std::uint64_t supervisor_incarnation{0};
  std::uint64_t epoch{0};
  std::vector<member> members;
  /// 1: the supervisor has begun a moment ago, and nodes that were there before may still register with it.
  /// 0: who is not in the list is no member.
  std::uint8_t collecting{0};
};

struct placement_request {
  std::string request;  ///< id of the request, for logs and affinity
  std::string from;     ///< stage; empty: the deployment's only edge
  std::string to;
  std::uint32_t timeout_ms{0};  ///< how long to wait when nobody is up; 0: fail at once
  /// Requests that name the same one (a session, a conversation) go to the same replicas while those
  /// are up; at most 256 bytes. Empty: wherever the policy says.
  std::string affinity{};
  /// Not empty: this is the same request once more, since these nodes of where it was placed were
  /// lost to it. Counts against `limits.retry_budget`.
  std::vector<std::string> failed{};
  /// With `failed`: 1 when the prefill replica holds the sealed cache, so that it is gone back to
  /// while it is up in the same life.
  std::uint8_t keep_source{0};
};

struct placement {
  std::uint8_t failed{0};
  std::string sentence;
  std::string request;
  std::uint64_t supervisor_incarnation{0};
  std::uint64_t epoch{0};
  std::uint32_t attempt{1};     ///< of this request, from 1
  std::uint8_t same_source{0};  ///< 1: the prefill replica of the attempt before, in the same life
  /// Of the edge. Of one over which no layers move it says nothing: no `receive` goes along it.
  transfer_mode mode{transfer_mode::write};
  std::vector<node_info> prefill;  ///< every rank of the chosen replica, in rank order
  std::vector<node_info> decode;
  /// Of the layout that both replicas have, where a stage is open; else all zero.
  kvcache::layout_fingerprint fingerprint{};
};
/// What is wrong with the supervisor's word where it placed a request. Empty: nothing.
[[nodiscard]] std::optional<troupe::error> wrong_mode(const placement& where);

/// An operator wants a node to take no new request, end what it has, and leave.
struct drain_request {
  std::string name;
  std::uint32_t deadline_ms{0};  ///< then it leaves whatever it still has
  std::uint8_t cancel{0};        ///< 1: it shall serve on
};
struct drain_reply {
  std::uint8_t failed{0};
  std::string sentence;
  std::uint64_t incarnation{0};  ///< that drains now
};
/// The supervisor's word to a node that is drained.
struct drain_order {
  std::uint64_t incarnation{0};
  /// 0: end what you have; 1: nothing is left, or the deadline passed: leave; 2: serve on
  std::uint8_t leave{0};
};

/// A process that was started for a stage, not for a name: which node shall it be?
struct slot_claim {
  std::uint32_t version{protocol_version};
  std::string cluster;
  std::string stage;
  std::uint64_t incarnation{0};  ///< that it will register with
  std::string host;
  std::uint32_t pid{0};
  std::string held{};  ///< the name that it was granted; it can be no other. Empty: none
};
struct slot_grant {
  std::uint8_t failed{0};
  std::string sentence;
  std::string name;          ///< of the deployment; nobody else gets it meanwhile
  std::uint32_t held_ms{0};  ///< so long it is kept for it to register
};

/// What happened in the cluster, for people: a line of `troupe events`.
struct cluster_event {
  std::uint64_t sequence{0};  ///< from 1, without gaps, of one life of the supervisor
  std::uint64_t unix_ms{0};   ///< the supervisor's wall clock; nothing is decided by it
  std::string what;           ///< `joining`, `up`, ... (a state), `refused`, `unplaced`, ...
  std::string node;
  std::uint64_t incarnation{0};
  std::uint64_t epoch{0};
  std::string text;
};
struct event_query {
  std::uint64_t after{0};  ///< the sequence of the last one that is known
  std::uint32_t max{0};
};
struct event_page {
  std::uint64_t supervisor_incarnation{0};
  std::uint64_t newest{0};  ///< sequence; older ones than those it keeps are gone
  std::vector<cluster_event> events;
};

/// One side's half of a new link.
struct link_request {
  std::uint32_t version{protocol_version};
  std::string cluster;
  node_info from;
  std::uint64_t to_incarnation{0};
  /// Who took the asking life in last, and at which epoch of its: tells a new life of a node from a
  /// former one that woke up.
  std::uint64_t supervisor_incarnation{0};
  std::uint64_t registered_epoch{0};
  std::uint8_t backend{0};  ///< `transport::backend_kind`
  std::uint32_t lanes{1};
  std::vector<std::string> gpus;  ///< bus ids of those that hold the sender's cache
  bytes offer;                    ///< `transport::link_offer::payload`
  bytes layout;                   ///< `kvcache::encode(cache_layout)`; empty: none registered yet
  std::string reason;             ///< why this backend, for the peer's log and status
};

struct link_reply {
  std::uint8_t failed{0};
  std::string sentence;
  bytes offer;
  bytes layout;
  std::vector<std::string> gpus;  ///< bus ids of those that hold the answering node's cache
};

/// What became of a link at one of its ends.
enum class link_fate : std::uint8_t {
  broke,       ///< its dialler dials again
  ended,       ///< it will not be made again
  node_stops,  ///< the link ends with its node
};

/// One end of a link to the other, beside the link: what its transport may not be able to tell.
struct link_notice {
  link_fate fate{link_fate::broke};
  std::string why;
};

// -- status

/// A lane that is a queue pair of a device.
struct lane_report {
  std::string device;
  std::uint32_t port{0};
  std::uint32_t gid_index{0};
  std::string gid;
  std::uint64_t requests_posted{0}, requests_completed{0}, bytes{0};
  std::uint8_t port_up{1};        ///< as the device said last
  std::uint32_t port_downs{0};    ///< how often the port went down since the node started
  std::uint32_t port_changes{0};  ///< how often its addresses or partition keys changed since then
  /// How often the port, not this lane alone, has sent again since the link was made last; negative:
  /// its driver does not count that.
  std::int64_t port_retries{-1};
};

struct link_report {
  std::string peer;
  std::uint64_t peer_incarnation{0};
  std::string backend;  ///< empty: none is chosen yet
  std::string reason;
  std::string state;  ///< connecting, up, rebuilding, broken
  std::uint32_t lanes{0};
  std::uint64_t bytes_out{0}, bytes_in{0}, in_flight{0}, refused{0};  ///< since it was made last
  std::uint32_t rebuilds{0};                         ///< how often it broke and was made again
  std::string last_break;                            ///< why it broke last; empty: never
  std::uint64_t posted{0}, completed{0}, failed{0};  ///< batches of this end, since then
  std::vector<lane_report> by_lane;                  ///< empty where lanes are no queue pairs
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
      memory{};  ///< of the host: what the cache is made of, "huge pages of 2 MiB, NUMA node 0"
};

/// A way to move bytes, and whether this node can use it now.
struct backend_report {
  std::string name;
  std::uint8_t usable{0};
  std::string reason;  ///< why not, or on what it stands
};

/// Receives of one peer that wait for a request that this node does not know yet.
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
  std::uint64_t operations_open{0};   ///< of the engine, until it has taken the last event of each
  std::uint64_t waiting_for_link{0};  ///< operations that wait for a link with their peer
  std::vector<parked_report> parked;  ///< by peer, of at most `limits.max_parked` each
};

// -- engines' own calls

/// A small request to the engine behind a node (a frontend hands it a prompt, say). At most
/// `max_call_bytes`; bulk data goes over links.
struct call_request {
  std::string method;
  bytes payload;
  std::uint32_t timeout_ms{0};
};
struct call_reply {
  std::uint8_t failed{0};
  std::string sentence;
  bytes payload;
};
inline constexpr std::size_t max_call_bytes = std::size_t{1} << 20;

// -- inspection

template <class I>
auto inspect(I& f, node_label& x) {
  return f(x.key, x.value);
}
template <class I>
auto inspect(I& f, node_info& x) {
  return f(x.name, x.stage, x.role, x.replica, x.rank, x.ranks, x.host, x.port, x.incarnation,
           x.pid, x.boot_id, x.network_namespace, x.pid_namespace, x.user_namespace, x.uid,
           x.replica_name, x.fingerprint, x.labels);
}
template <class I>
auto inspect(I& f, registration_request& x) {
  return f(x.version, x.cluster, x.node, x.wanted_replica, x.join);
}
template <class I>
auto inspect(I& f, registration& x) {
  return f(x.failed, x.sentence, x.replica, x.epoch, x.supervisor_incarnation,
           x.heartbeat_interval_ms);
}
template <class I>
auto inspect(I& f, load_report& x) {
  return f(x.queue_length, x.active_transfers, x.blocks_total, x.blocks_free, x.blocks_quarantined,
           x.links_up, x.links_broken);
}
template <class I>
auto inspect(I& f, heartbeat& x) {
  return f(x.name, x.incarnation, x.sequence, x.load, x.failure, x.epoch);
}
template <class I>
auto inspect(I& f, heartbeat_ack& x) {
  return f(x.known, x.epoch, x.supervisor_incarnation);
}
template <class I>
auto inspect(I& f, member& x) {
  return f(x.node, x.state, x.load, x.reason, x.registered);
}
template <class I>
auto inspect(I& f, membership& x) {
  return f(x.cluster, x.supervisor_incarnation, x.epoch, x.members, x.collecting);
}
template <class I>
auto inspect(I& f, placement_request& x) {
  return f(x.request, x.from, x.to, x.timeout_ms, x.affinity, x.failed, x.keep_source);
}
template <class I>
auto inspect(I& f, placement& x) {
  return f(x.failed, x.sentence, x.request, x.supervisor_incarnation, x.epoch, x.attempt,
           x.same_source, x.mode, x.prefill, x.decode, x.fingerprint);
}
template <class I>
auto inspect(I& f, drain_request& x) {
  return f(x.name, x.deadline_ms, x.cancel);
}
template <class I>
auto inspect(I& f, drain_reply& x) {
  return f(x.failed, x.sentence, x.incarnation);
}
template <class I>
auto inspect(I& f, drain_order& x) {
  return f(x.incarnation, x.leave);
}
template <class I>
auto inspect(I& f, slot_claim& x) {
  return f(x.version, x.cluster, x.stage, x.incarnation, x.host, x.pid, x.held);
}
template <class I>
auto inspect(I& f, slot_grant& x) {
  return f(x.failed, x.sentence, x.name, x.held_ms);
}
template <class I>
auto inspect(I& f, cluster_event& x) {
  return f(x.sequence, x.unix_ms, x.what, x.node, x.incarnation, x.epoch, x.text);
}
template <class I>
auto inspect(I& f, event_query& x) {
  return f(x.after, x.max);
}
template <class I>
auto inspect(I& f, event_page& x) {
  return f(x.supervisor_incarnation, x.newest, x.events);
}
template <class I>
auto inspect(I& f, link_request& x) {
  return f(x.version, x.cluster, x.from, x.to_incarnation, x.supervisor_incarnation,
           x.registered_epoch, x.backend, x.lanes, x.gpus, x.offer, x.layout, x.reason);
}
template <class I>
auto inspect(I& f, link_reply& x) {
  return f(x.failed, x.sentence, x.offer, x.layout, x.gpus);
}
template <class I>
auto inspect(I& f, link_notice& x) {
  return f(x.fate, x.why);
}
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
template <class I>
auto inspect(I& f, call_request& x) {
  return f(x.method, x.payload, x.timeout_ms);
}
template <class I>
auto inspect(I& f, call_reply& x) {
  return f(x.failed, x.sentence, x.payload);
}

}  // namespace troupe::actors
