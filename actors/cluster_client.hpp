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
  /// Set `actors.security` with `door_security_of` (host_options.hpp). By default the client has no
  /// secret: only a cluster of mode `none` answers, others return `unauthorized`.
  actor_host_options actors{};
  /// Where the supervisor is now, for a deployment that begins its supervisor on demand
  /// (`look_for_supervisor`, supervisor_begin.hpp). Called before each connection to the
  /// supervisor, at most once a second. Empty: the supervisor is at `host` and `port`.
  supervisor_look find{};
};

/// How far a call got.
enum class call_reach : std::uint8_t {
  answered,     ///< the node answered it, be it with an error
  unreachable,  ///< the call never reached the node
  lost,         ///< the connection broke, or the node was silent, before the answer came
};
struct call_outcome {
  result<std::vector<std::uint8_t>> answer;
  call_reach reach{call_reach::answered};
};

/// Thread-safe; calls of different threads run concurrently. Errors of every call:
/// `peer_unreachable`, `deadline` (the peer is there but does not answer), `peer_lost` (its
/// connection broke), `unauthorized` (one side's credentials are of another cluster), and the other
/// side's own. The next call makes a broken connection again, so a client outlives a restarted
/// supervisor or node.
class cluster_client {
 public:
  /// Connects to the supervisor, within `options.timeout`.
  [[nodiscard]] static result<std::unique_ptr<cluster_client>> connect(
      cluster_client_options options);
  /// Connects with the first call, for callers whose supervisor may not be there yet.
  [[nodiscard]] static std::unique_ptr<cluster_client> unconnected(cluster_client_options options);

  /// Where the supervisor was last found, for messages: "127.0.0.1:7400". Until it was found, the
  /// address in the options: the host alone if they have no port.
  [[nodiscard]] std::string supervisor_address() const;

  ~cluster_client();
  cluster_client(const cluster_client&) = delete;
  cluster_client& operator=(const cluster_client&) = delete;

  /// Every node that registered, its state and newest load.
  [[nodiscard]] result<membership> members();
  /// The nodes of open stages that carry exactly this label and are not down. Empty if there are
  /// none.
  [[nodiscard]] result<std::vector<member>> find_label(const std::string& key,
                                                       const std::string& value);
  /// Waits up to `request.timeout_ms` for replicas of both stages to be up. The error of a refused
  /// placement is the supervisor's own.
  [[nodiscard]] result<placement> place(const placement_request& request);
  /// Same as `place`, but waits no longer than `patience` in all and ends with `aborted` once
  /// `given_up` is requested. The answer may say `failed`; an error means that the supervisor did
  /// not answer.
  [[nodiscard]] result<placement> ask_placement(const placement_request& request,
                                                std::chrono::milliseconds patience,
                                                std::stop_token given_up = {});
  /// What happened in the cluster after `query.after`, oldest first.
  [[nodiscard]] result<event_page> events(const event_query& query);
  /// Tells the supervisor that a request ended, whether it was placed or still waiting. Not
  /// answered.
  [[nodiscard]] result<void> finished(const std::string& request);
  /// Places nothing more on a node's replica and lets the node leave when nothing is left there, or
  /// at the deadline. Returns at once with the names of the nodes that now drain (they are
  /// `leaving` until they are `down`), or with the reason why they cannot be drained. With
  /// `request.cancel`, returns the names of the nodes that serve on; `not_found` if they are not
  /// being drained, `peer_lost` if it is too late.
  [[nodiscard]] result<drain_reply> drain(const drain_request& request);
  /// What a node owns and does. `not_found` if no node of that name ever registered.
  [[nodiscard]] result<node_report> report(const std::string& node);
  [[nodiscard]] result<node_report> report(const node_info& node);
  /// A small request to the engine behind a node, answered within `request.timeout_ms` (0: the
  /// client's own timeout). At most `max_call_bytes`, else `out_of_range`.
  [[nodiscard]] result<std::vector<std::uint8_t>> call(const std::string& node,
                                                       const call_request& request);
  [[nodiscard]] result<std::vector<std::uint8_t>> call(const node_info& node,
                                                       const call_request& request);
  /// Same as `call`, but tells the node's own errors from those of the connection. Once `given_up`
  /// is requested, stops waiting for the answer (`aborted`); the node is not told.
  [[nodiscard]] call_outcome call_outcome_of(const node_info& node, const call_request& request,
                                             std::stop_token given_up = {});

 private:
  /// The actor system and the open connections; only its definition knows CAF.
  class connections;

  explicit cluster_client(cluster_client_options options);
  [[nodiscard]] result<node_info> find(const std::string& node);

  cluster_client_options options_;
  std::unique_ptr<connections> connections_;
};

}  // namespace troupe::actors
