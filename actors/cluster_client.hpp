#pragma once

/// A cluster seen from outside, for command lines, frontends and benchmarks: blocking calls, each
/// with a deadline and a `result`. It connects to the supervisor and, for reports and calls,
/// straight to the node.
///
///     cluster_client_options options{.port = 7400};
///     options.actors.security = door_security_of(deployment).value();  // host_options.hpp
///     auto cluster = cluster_client::connect(options);
///     if (!cluster) return cluster.error();
///     auto where = (*cluster)->place({.request = "r1", .from = "prefill", .to = "decode"});

#include <chrono>
#include <cstdint>
#include <memory>
#include <stop_token>
#include <string>
#include <vector>

#include "troupe/actors/actor_host_options.hpp"
#include "troupe/actors/cluster_messages.hpp"
#include "troupe/actors/supervisor_begin.hpp"
#include "troupe/kvcache/result.hpp"

namespace troupe::actors {

struct cluster_client_options {
  std::string host{"127.0.0.1"};  ///< of the supervisor
  std::uint16_t port{0};
  std::chrono::milliseconds timeout{3000};  ///< of every step that has no deadline of its own
  /// `actors.security` as the deployment has it (`door_security_of`, host_options.hpp). Left as it is,
  /// the client knows no secret: only a cluster of mode `none` answers, others with `unauthorized`.
  actor_host_options actors{};
  /// Where the supervisor is now, for a deployment whose supervisor nobody has to start
  /// (`look_for_supervisor`, supervisor_begin.hpp): asked before each connection to it, at most once a
  /// second. Empty: at `host` and `port`.
  supervisor_look find{};
};

/// How far a call came.
enum class call_reach : std::uint8_t {
  answered,     ///< the node answered it, be it with an error
  unreachable,  ///< it never got there
  lost,         ///< the connection broke, or the node was silent, before the answer came
};
struct call_outcome {
  result<std::vector<std::uint8_t>> answer;
  call_reach reach{call_reach::answered};
};

/// Thread-safe; calls of different threads run side by side. Errors of every call:
/// `peer_unreachable`, `deadline` (the peer is there and says nothing), `peer_lost` (its connection
/// broke), `unauthorized` (its credentials or ours are of another cluster), and those that the other side answers with. A connection that broke is made again by the
/// next call, so that a client outlives a restarted supervisor or node.
class cluster_client {
 public:
  /// Connects to the supervisor, within `options.timeout`.
  [[nodiscard]] static result<std::unique_ptr<cluster_client>> connect(
      cluster_client_options options);
  /// Connects with the first call: for who waits for a supervisor that may not be there yet.
  [[nodiscard]] static std::unique_ptr<cluster_client> unconnected(cluster_client_options options);

  /// Where the supervisor was found last, for sentences: "127.0.0.1:7400". Until a look has found it: as
  /// the options say, the host alone where they know no port.
  [[nodiscard]] std::string supervisor_address() const;

  ~cluster_client();
  cluster_client(const cluster_client&) = delete;
  cluster_client& operator=(const cluster_client&) = delete;

  /// Every node that registered, its state and newest load.
  [[nodiscard]] result<membership> members();
  /// Nodes of open stages that say exactly this of themselves, and are not down. None: empty.
  [[nodiscard]] result<std::vector<member>> find_label(const std::string& key,
                                                       const std::string& value);
  /// Waits up to `request.timeout_ms` for replicas of both stages to be up. The error of a refused
  /// placement is the supervisor's own.
  [[nodiscard]] result<placement> place(const placement_request& request);
  /// The same, waiting no longer than `patience` in all, nor once it is `given_up` (`aborted`). The
  /// answer may say `failed`; an error means that the supervisor was not heard.
  [[nodiscard]] result<placement> ask_placement(const placement_request& request,
                                                std::chrono::milliseconds patience,
                                                std::stop_token given_up = {});
  /// What happened in the cluster after `query.after`, oldest first.
  [[nodiscard]] result<event_page> events(const event_query& query);
  /// Tells the supervisor that a request ended, placed or still waiting for a place. Not answered.
  [[nodiscard]] result<void> finished(const std::string& request);
  /// Places nothing more on a node's replica and lets it leave when nothing is left there, or at the
  /// deadline. Returns at once: the names of the nodes that drain now, which are `leaving` until
  /// they are `down`, and why not if they cannot be drained. With `request.cancel`: the names of those
  /// that serve on; `not_found` when nobody drains them, `peer_lost` when it is too late.
  [[nodiscard]] result<drain_reply> drain(const drain_request& request);
  /// What a node owns and does. `not_found` when no node of that name ever registered.
  [[nodiscard]] result<node_report> report(const std::string& node);
  [[nodiscard]] result<node_report> report(const node_info& node);
  /// A small request to the engine behind a node, answered within `request.timeout_ms` (0: the
  /// client's own timeout). At most `max_call_bytes`, else `out_of_range`.
  [[nodiscard]] result<std::vector<std::uint8_t>> call(const std::string& node,
                                                       const call_request& request);
  [[nodiscard]] result<std::vector<std::uint8_t>> call(const node_info& node,
                                                       const call_request& request);
  /// The same, telling the node's own errors from those of the way to it. Once it is `given_up`, the
  /// answer is not waited for (`aborted`); the node is not told.
  [[nodiscard]] call_outcome call_outcome_of(const node_info& node, const call_request& request,
                                             std::stop_token given_up = {});

 private:
  /// The actor system and what is connected to; its definition is the only part that knows CAF.
  class connections;

  explicit cluster_client(cluster_client_options options);
  [[nodiscard]] result<node_info> find(const std::string& node);

  cluster_client_options options_;
  std::unique_ptr<connections> connections_;
};

}  // namespace troupe::actors
