#pragma once

/// Chooses the replicas that serve a request: for every edge of the deployment a pair (from, to),
/// such as (prefill, decode). A plain class without threads, I/O or a clock; the `supervisor` actor
/// feeds it.
///
/// A replica is a candidate while every one of its ranks is `up`. Each stage chooses by its own
/// policy, and eases in replicas that have just come up: `stage_router.hpp`.
///
/// **Affinity** comes before the policy: a request that names an affinity goes, in each stage of
/// its edge, to the replica that the last request of the same affinity went to. That binding holds
/// while all ranks of the replica are `up`, in the life in which it was made. When the next request
/// finds one of them in any other state, `suspect` and `leaving` too, or restarted (the cache there
/// is gone), the policy binds the affinity again, and the new binding stays when the former replica
/// comes back. The placement's `sentence` then says from where to where and why. A restarted
/// supervisor knows no affinities.
///
/// **Retries** (`placement_request::failed`): a request that has lost nodes gives its places in the
/// queues back and gets others. It stays with a replica that lost none of its nodes and has been up
/// in the same life since: the decode replica always (its prefix and its blocks are there), the
/// prefill replica if the asker says that the cache is kept there. Replicas of lost nodes are
/// avoided while others are up, even before the membership shows them as down: the asker saw the
/// loss first. `retry_budget` bounds the retries. An asker that did not get the answer and repeats
/// its request gets the same answer if none of those nodes was lost since, and the two count as one
/// retry.
///
/// **Open stages.** If one of an edge's stages is open, the prefill replica is chosen first, among
/// those for which a decode replica of an equal layout is up, and then one of these decode
/// replicas. No replica is placed with itself.
///
/// If no replica is up, a request waits in arrival order until its own deadline, in a line of
/// bounded length.

#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "troupe/actors/cluster_messages.hpp"
#include "troupe/actors/membership/affinity_table.hpp"
#include "troupe/actors/membership/membership.hpp"
#include "troupe/actors/membership/stage_router.hpp"
#include "troupe/config/transfer_mode.hpp"
#include "troupe/kvcache/result.hpp"

namespace troupe::actors {

struct router_edge {
  std::string from;
  std::string to;
  std::optional<transfer_mode> mode{};  ///< empty: only keyed put and get use the edge
};

struct router_options {
  std::vector<router_edge> edges;
  std::map<std::string, placement_policy>
      policies;                      ///< by stage; `round_robin` where none is named
  std::vector<expected_slot> slots;  ///< the nodes that make up the replicas of each stage
  std::set<std::string> open{};      ///< stages whose replicas the membership shows
  std::size_t max_waiting{4096};     ///< requests in line, over all edges
  std::size_t max_tracked{
      65536};  ///< placed requests remembered until `finished`; the oldest is forgotten
  std::size_t max_affinities{65'536};    ///< remembered; the least recently used is forgotten
  std::uint32_t retry_budget{2};         ///< placements of one request after its first
  std::chrono::milliseconds ease_in{0};  ///< of a replica that comes up
  std::uint64_t seed{0};                 ///< of `random`
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

  /// Called before any other event. Lives that were taken in up to that epoch have already served
  /// under the previous supervisor, and are not eased in.
  void remember(std::uint64_t epoch);
  /// The membership changed. Call `serve` and `take_notes` after it.
  void update(const membership& members, steady_time now);
  /// A node's newest load. The load of a former incarnation is ignored.
  void load(std::string_view name, std::uint64_t incarnation, const load_report& report);
  /// Places a request now, or puts it in line and returns a ticket if it may wait and nobody is up.
  /// Errors: `not_found` (no such edge), `invalid_config` (the edge is ambiguous, the id or the
  /// affinity is too long), `peer_unreachable` (nobody up, no time to wait), `overloaded` (the line
  /// is full), `peer_lost` (its `retry_budget` is used up).
  [[nodiscard]] result<std::variant<placement, ticket_id>> place(const placement_request& request,
                                                                 steady_time now);
  /// A request ended, placed or still in line. Unknown ids are ignored.
  void finished(std::string_view request);
  /// Takes from the line, in arrival order, the requests that can be placed now or whose deadline
  /// has passed (`deadline`).
  [[nodiscard]] std::vector<served_ticket> serve(steady_time now);
  /// Empties the line, in arrival order, when the router stops. Every outcome is `aborted`.
  [[nodiscard]] std::vector<served_ticket> abandon();
  /// Sentences for the log about replicas that are eased in.
  [[nodiscard]] std::vector<std::string> take_notes();

  // -- properties

  [[nodiscard]] std::size_t waiting() const noexcept { return line_.size(); }
  [[nodiscard]] std::size_t tracked() const noexcept { return placed_.size(); }
  [[nodiscard]] std::size_t affinities() const noexcept { return affinities_.size(); }
  /// Requests placed on a replica, in its present life, whose end was not reported. Scans all
  /// tracked requests: do not call it for every request.
  [[nodiscard]] std::size_t unfinished(std::string_view stage, std::uint32_t replica) const;
  /// The estimated number of requests that a replica holds.
  [[nodiscard]] std::uint64_t queue_length(std::string_view stage, std::uint32_t replica) const;

 private:
  /// The previous attempt.
  struct former_attempt {
    std::size_t edge{0};
    std::size_t from{0}, to{0};  ///< replicas
    std::uint64_t from_life{0}, to_life{0};
    std::uint64_t epoch{0};
  };
  /// The number of an attempt to place a request, and the previous one.
  struct attempt {
    std::uint32_t number{1};
    std::optional<former_attempt> former;
    bool said_again{false};  ///< the answer of this very attempt was lost and is repeated
  };
  struct waiting_request {
    ticket_id ticket{0};
    placement_request request;
    std::size_t edge{0};
    attempt which;
    steady_time arrived{};
    steady_time deadline{};
    bool over{false};  ///< the asker no longer wants a place
  };
  struct choice {
    std::size_t replica{0};
    std::string move;  ///< if a binding was dropped: from where to where, and why
  };
  struct tracked_part {
    std::size_t stage{0};
    stage_router::receipt placed;
  };
  struct tracked_request {
    tracked_part from, to;
    attempt last;
    former_attempt where;
    std::vector<std::string> failed;  ///< `failed` of the latest request
    bool in_line{false};              ///< the latest request waits for its answer
    bool same_source{false};          ///< as in the latest answer
    bool queued{true};                ///< it has its places in the queues
    std::uint64_t order{0};
  };

  [[nodiscard]] result<std::size_t> find_edge(const placement_request& request) const;
  [[nodiscard]] std::string edge_names() const;
  [[nodiscard]] bool has_candidate(std::size_t edge) const;
  /// Whether layers can move from one replica to the other. Always true for edges between stages of
  /// the file.
  [[nodiscard]] bool fits(std::size_t edge, std::size_t from, std::size_t to) const;
  void find_mates();
  [[nodiscard]] stage_router::filter sources_of(std::size_t edge) const;
  [[nodiscard]] std::string no_two_fit(std::size_t edge) const;
  [[nodiscard]] std::string nobody_up(std::size_t edge) const;
  /// The attempt that a retried request makes now. Its former places are given back.
  [[nodiscard]] result<attempt> next_attempt(const placement_request& request);
  [[nodiscard]] placement assign(const placement_request& request, std::size_t edge,
                                 const attempt& which, steady_time now);
  [[nodiscard]] placement answer(const placement_request& request, const former_attempt& where,
                                 std::uint32_t number, bool same_source) const;
  /// Whether this request repeats the placed one, and both its replicas are still unhurt.
  [[nodiscard]] bool stands(const tracked_request& placed, const placement_request& request) const;
  enum class side : std::uint8_t { source, target };
  /// Chooses a replica of that stage, by affinity or policy.
  [[nodiscard]] choice choose(std::size_t stage, side at, const placement_request& request,
                              steady_time now, const stage_router::filter& may);
  /// Whether a replica of the previous attempt lost no node, and nothing that it held is void.
  [[nodiscard]] bool is_unhurt(std::size_t stage, std::size_t replica, std::uint64_t life,
                               std::uint64_t epoch, const std::vector<std::string>& failed) const;
  void forget(std::string_view request);
  void give_back(tracked_request& request);
  void track(const std::string& request, tracked_request placed);
  [[nodiscard]] std::size_t stage_index(std::string_view name) const;

  router_options options_;
  std::vector<stage_router> stages_;
  std::vector<std::pair<std::size_t, std::size_t>>
      edge_stages_;  ///< indices into `stages_`, per edge
  /// By edge with an open stage, and prefill replica: whether a decode replica that is up fits it.
  std::map<std::size_t, std::vector<bool>> mates_;
  affinity_table affinities_;
  std::uint64_t epoch_{0};
  std::uint64_t supervisor_{0};  ///< incarnation of the supervisor whose epochs these are
  std::deque<waiting_request> line_;
  ticket_id last_ticket_{0};
  std::unordered_map<std::string, tracked_request> placed_;
  std::deque<std::pair<std::uint64_t, std::string>> placed_order_;
  std::uint64_t last_order_{0};
};

}  // namespace troupe::actors
