#pragma once

/// The structs that cross CAF's own network layer: registration, heartbeats, membership, link offers,
/// and those of placement.hpp and report.hpp. Plain data. Enums travel as their numbers and are
/// range-checked by whoever receives them (`node_state_from` and so on): CAF does not. A reply that can
/// fail carries `failed` and `sentence`.

#include <cstdint>
#include <string>
#include <vector>

#include "troupe/actors/node_info.hpp"
#include "troupe/actors/placement.hpp"
#include "troupe/actors/report.hpp"

namespace troupe::actors {

/// Raised by every change of a cluster or session message; compared before the first byte.
inline constexpr std::uint32_t protocol_version = 13;

using bytes = std::vector<std::uint8_t>;

struct registration_request {
  std::uint32_t version{protocol_version};
  std::string cluster;
  node_info node;
  std::uint32_t wanted_replica{0};  ///< of the deployment's slot; the supervisor decides
  std::uint8_t join{0};             ///< 1: a node that the file does not name joins an open stage
};

struct registration {
  std::uint8_t failed{0};
  std::string sentence;
  std::uint32_t replica{0};
  std::uint64_t epoch{0};
  std::uint64_t supervisor_incarnation{0};
  std::uint32_t heartbeat_interval_ms{1000};
};

/// What a node reports about itself with every heartbeat.
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
  std::string failure;     ///< why the node cannot serve; empty if it can
  std::uint64_t epoch{0};  ///< of the newest membership that the node has
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
  /// When this life was admitted, or admitted again after it had been down. Anything placed on it
  /// before is void.
  std::uint64_t registered{0};
};

/// The supervisor's full view of the cluster at one epoch.
struct membership {
  std::string cluster;
  std::uint64_t supervisor_incarnation{0};
  std::uint64_t epoch{0};
  std::vector<member> members;
  /// 1: the supervisor has just begun, and nodes from before may still register with it. 0: a node
  /// that is not in the list is no member.
  std::uint8_t collecting{0};
};

/// An operator asks a node to accept no new request, finish those that it has, and leave.
struct drain_request {
  std::string name;
  std::uint32_t deadline_ms{0};  ///< after that it leaves, whatever it still has
  std::uint8_t cancel{0};        ///< 1: the node is to go on serving
};
struct drain_reply {
  std::uint8_t failed{0};
  std::string sentence;
  std::uint64_t incarnation{0};  ///< of the life that now drains
};
/// What a draining node is to do.
enum class drain_step : std::uint8_t {
  finish,  ///< end what it has, and take no more
  leave,   ///< nothing is left, or the deadline has passed
  resume,  ///< serve on: the drain was cancelled
};
/// The supervisor's order to a draining node.
struct drain_order {
  std::uint64_t incarnation{0};
  drain_step step{drain_step::finish};
};

/// Asks which node of a stage this process is to be; it was started for the stage, not for a name.
struct name_request {
  std::uint32_t version{protocol_version};
  std::string cluster;
  std::string stage;
  std::uint64_t incarnation{0};  ///< that it will register with
  std::string host;
  std::uint32_t pid{0};
  std::string held{};  ///< the name granted before, which it must keep; empty if none
};
struct name_lease {
  std::uint8_t failed{0};
  std::string sentence;
  std::string name;          ///< a node name of the deployment, reserved for this process
  std::uint32_t held_ms{0};  ///< how long the name stays reserved for it to register
};

/// Something that happened in the cluster, for people: a line of `troupe events`.
struct cluster_event {
  std::uint64_t sequence{0};  ///< from 1 and without gaps within one life of the supervisor
  std::uint64_t unix_ms{0};   ///< the supervisor's wall clock; nothing is decided by it
  std::string what;           ///< `joining`, `up`, ... (a state), `refused`, `unplaced`, ...
  std::string node;
  std::uint64_t incarnation{0};
  std::uint64_t epoch{0};
  std::string text;
};
struct event_query {
  std::uint64_t after{0};  ///< sequence of the newest event that the caller has
  std::uint32_t max{0};
};
struct event_page {
  std::uint64_t supervisor_incarnation{0};
  std::uint64_t newest{0};  ///< newest sequence number; the supervisor drops its oldest events
  std::vector<cluster_event> events;
};

/// One side's half of a new link.
struct link_request {
  std::uint32_t version{protocol_version};
  std::string cluster;
  node_info from;
  std::uint64_t to_incarnation{0};
  /// The supervisor that last admitted the asking life, and its epoch then: tells a new life of a
  /// node from a former one that woke up.
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

/// Sent by one end of a link to the other, beside the link, for what its transport may not report.
struct link_notice {
  link_fate fate{link_fate::broke};
  std::string why;
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
auto inspect(I& f, drain_request& x) {
  return f(x.name, x.deadline_ms, x.cancel);
}
template <class I>
auto inspect(I& f, drain_reply& x) {
  return f(x.failed, x.sentence, x.incarnation);
}
template <class I>
auto inspect(I& f, drain_order& x) {
  return f(x.incarnation, x.step);
}
template <class I>
auto inspect(I& f, name_request& x) {
  return f(x.version, x.cluster, x.stage, x.incarnation, x.host, x.pid, x.held);
}
template <class I>
auto inspect(I& f, name_lease& x) {
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
auto inspect(I& f, call_request& x) {
  return f(x.method, x.payload, x.timeout_ms);
}
template <class I>
auto inspect(I& f, call_reply& x) {
  return f(x.failed, x.sentence, x.payload);
}

}  // namespace troupe::actors
