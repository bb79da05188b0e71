#pragma once

/// Chooses the replicas that serve a request: for every edge of the deployment a pair (from, to),
/// such as (prefill, decode). A plain class without threads, I/O or a clock; the `supervisor` actor
/// feeds it.
///
/// A replica is a candidate while every one of its ranks is `up`. Each stage chooses by its own
/// policy:
///
/// - `round_robin`: the candidate after the last one chosen;
/// - `least_queue_length`: the shortest queue, which is the last heartbeat's length (the longest of
///   the ranks) plus what was placed and less what finished since; ties go round;
/// - `random`: any, by a seeded generator.
///
/// Where nobody is up, a request waits in arrival order until its own deadline, in a line of
/// bounded length.

#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <random>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "troupe/actors/cluster_messages.hpp"
#include "troupe/actors/membership.hpp"
#include "troupe/kvcache/result.hpp"

namespace troupe::actors {

enum class placement_policy : std::uint8_t { round_robin, least_queue_length, random };

struct router_edge {
  std::string from;
  std::string to;
  std::string mode;  ///< `write` or `read`; empty where only keyed put and get go along
};

struct router_options {
  std::vector<router_edge> edges;
  std::map<std::string, placement_policy>
      policies;                      ///< by stage; `round_robin` where none is named
  std::vector<expected_slot> slots;  ///< who makes up which replica of which stage
  std::size_t max_waiting{4096};     ///< requests in line, over all edges
  std::size_t max_tracked{
      65536};             ///< placed requests remembered until `finished`; the oldest is forgotten
  std::uint64_t seed{0};  ///< of `random`
};

/// A request that waits in the router's line.
using ticket_id = std::uint64_t;

/// The end of a wait: a placement, or why there is none.
struct served_ticket {
  ticket_id ticket{0};
  result<placement> outcome;
};

class router {
 public:
  explicit router(router_options options);

  // -- events

  /// The membership changed. Call `serve` after it.
  void update(const membership& members);
  /// A node's newest load. A former incarnation's is ignored.
  void load(std::string_view name, std::uint64_t incarnation, const load_report& report);
  /// Places a request now, or puts it in line (a ticket, when it may wait and nobody is up).
  /// Errors: `not_found` (no such edge), `invalid_config` (the edge is ambiguous, or the id is too
  /// long), `peer_unreachable` (nobody up, no time to wait), `overloaded` (the line is full).
  [[nodiscard]] result<std::variant<placement, ticket_id>> place(const placement_request& request,
                                                                 steady_time now);
  /// A placed request ended. Unknown ids are ignored.
  void finished(std::string_view request);
  /// Those of the line that can be placed now or whose deadline passed (`deadline`), in arrival
  /// order.
  [[nodiscard]] std::vector<served_ticket> serve(steady_time now);
  /// Empties the line, in arrival order: the router stops. Every outcome is `aborted`.
  [[nodiscard]] std::vector<served_ticket> abandon();

  // -- properties

  [[nodiscard]] std::size_t waiting() const noexcept { return line_.size(); }
  [[nodiscard]] std::size_t tracked() const noexcept { return placed_.size(); }
  /// Requests that a replica is thought to hold.
  [[nodiscard]] std::uint64_t queue_length(std::string_view stage, std::uint32_t replica) const;

 private:
  struct rank_view {
    std::string name;
    bool registered{false};
    node_state state{node_state::down};
    node_info info;
    std::uint32_t queue_length{0};
  };
  struct replica_view {
    std::uint32_t id{0};
    std::vector<rank_view> ranks;
    std::uint64_t placed_since{0};    ///< since the last heartbeat of rank 0
    std::uint64_t finished_since{0};  ///< of those that the last heartbeat counted
    std::uint64_t beats{0};           ///< heartbeats of rank 0 seen
    [[nodiscard]] bool all_up() const;
    [[nodiscard]] std::uint64_t queue() const;
  };
  struct stage_view {
    std::string name;
    placement_policy policy{placement_policy::round_robin};
    std::vector<replica_view> replicas;
    std::size_t next{0};  ///< where the round goes on
  };
  struct waiting_request {
    ticket_id ticket{0};
    placement_request request;
    std::size_t edge{0};
    steady_time arrived{};
    steady_time deadline{};
  };
  struct choice {
    std::size_t stage{0};
    std::size_t replica{0};
    std::uint64_t beats{0};
  };
  struct tracked_request {
    choice from, to;
    std::uint64_t order{0};
  };

  [[nodiscard]] result<std::size_t> find_edge(const placement_request& request) const;
  [[nodiscard]] std::string edge_names() const;
  [[nodiscard]] bool has_candidate(std::size_t edge) const;
  [[nodiscard]] std::string nobody_up(std::size_t edge) const;
  [[nodiscard]] placement assign(const placement_request& request, std::size_t edge);
  [[nodiscard]] std::size_t choose(stage_view& stage);
  void track(const std::string& request, choice from, choice to);
  void release(const choice& c);
  [[nodiscard]] std::size_t stage_index(std::string_view name) const;
  [[nodiscard]] static bool has_candidate(const stage_view& stage);

  router_options options_;
  std::vector<stage_view> stages_;
  std::vector<std::pair<std::size_t, std::size_t>>
      edge_stages_;  ///< indices into `stages_`, per edge
  std::map<std::string, std::pair<std::size_t, std::size_t>, std::less<>> node_replica_;
  std::uint64_t epoch_{0};
  std::deque<waiting_request> line_;
  ticket_id last_ticket_{0};
  std::unordered_map<std::string, tracked_request> placed_;
  std::deque<std::pair<std::uint64_t, std::string>> placed_order_;
  std::uint64_t last_order_{0};
  std::mt19937_64 random_;
};

}  // namespace troupe::actors
