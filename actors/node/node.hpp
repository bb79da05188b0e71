#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <caf/typed_event_based_actor.hpp>
#include <caf/typed_response_promise.hpp>

#include "troupe/actors/base/restart_intensity.hpp"
#include "troupe/actors/context/node_context.hpp"
#include "troupe/actors/logging.hpp"
#include "troupe/actors/messages/messages.hpp"
#include "troupe/actors/operations/node_drain.hpp"

namespace troupe::actors {

namespace node_parts {
struct report_in_progress;
}

/// The cluster side of a node: registers, beats, keeps the last membership, makes links on demand,
/// takes links and calls in. The one published actor of its process. Waits for its first tick,
/// which comes when the port is bound, before it registers.
///
///   state         event                           next          what happens
///   ------------  ------------------------------  ------------  ------------
///   unregistered  supervisor reached and accepts  registered    heartbeats begin
///   unregistered  unreachable, refused            unregistered  tries again with each beat; at
///                                                               first sooner where nobody listens
///                                                               (50 ms, then twice as long)
///   registered    heartbeat unknown, rejoin       unregistered  registers again, links stay
///   registered    supervisor gone                 unregistered  keeps its membership and its links;
///                                                               placements fail
///   unregistered  still, and supervisor.begin     unregistered  a thread looks for one, and begins it
///                                                               where there is none, once a second
///                                                               at most; then that one is asked
///   unregistered  refused: another life replaced  replaced      closes its links, asks no more
///                 this one (`stale_incarnation`)
///   registered    the engine reports a failure    registered    beats at once, and says it with each
///   registered    the engine has recovered        unregistered  registers again, says it no more
///   any           drain_order                     the same      still takes on what comes;
///                                                               `node_drain` has its own table
///   any           its port or pool manager crashed  over        tells the supervisor why, closes its
///                                                               links, fails placements and calls
///   any           stop_node                       -             leaves, closes links, quits
struct node_state_data {
  struct known_link {
    std::string peer;
    std::uint64_t incarnation{0};
    link_actor actor;
    std::uint64_t asked{0};               ///< `need_link::ask`; 0: the peer dialled
    registration_state::mark registered;  ///< what is known of when the peer's life was taken in
  };
  /// Links with one life of a peer that crashed.
  struct link_crashes {
    std::uint64_t incarnation{0};
    restart_intensity limit{5, std::chrono::seconds{10}};
    bool given_up{false};
  };
  struct wanted_link {
    need_link order;
    std::chrono::steady_clock::time_point since;
    bool asks{false};  ///< the supervisor, who has not answered yet
  };

  context_ptr context;
  node_drain_ptr drain;
  engine_port_actor port;
  pool_manager_actor pool;
  supervisor_actor supervisor;
  caf::actor_addr watched;  ///< the supervisor that we would hear the end of
  bool registered{false};
  bool registering{false};
  std::chrono::steady_clock::time_point asking_since;  ///< while registering
  /// Attempts to register, those that failed counted twice: what is said to an earlier one is of no
  /// account.
  std::uint64_t attempt{0};
  bool replaced{false};  ///< by another life of the node, or crashed: it is over
  errc refusal_code{errc::stale_incarnation};  ///< why it is over
  std::string refusal;                         ///< the last reason for not being registered
  std::optional<errc> refusal_said;  ///< its kind, when that was logged; empty: registered
  log_limiter reminder{std::chrono::seconds{30}};  ///< of a refusal that goes on
  membership members;
  std::unordered_map<caf::actor_id, known_link> links;
  std::map<std::string, link_crashes> crashed_links;  ///< by peer
  /// Peers that the port needs and no membership has shown yet (or not their next life).
  std::vector<wanted_link> wanted;
  struct pending_call {
    caf::typed_response_promise<call_reply> promise;
    time_point deadline;
  };
  std::unordered_map<std::uint64_t, pending_call> calls;
  std::uint64_t next_call{1};
  struct pending_placement {
    std::string request;
    time_point deadline;  ///< of the supervisor's answer
  };
  std::map<operation_id, pending_placement> placements;  ///< that the supervisor has not answered
  /// Placed requests that ended while no supervisor could be told, oldest first.
  std::deque<std::string> untold;
  /// Reports that somebody waits for.
  std::set<std::shared_ptr<node_parts::report_in_progress>> reports;
  std::uint64_t beats{0};
  std::string failure;  ///< that the engine reported, as heartbeats say it; empty: none
  /// Where it is asked. Empty: where the settings say.
  std::optional<found_supervisor> found;
  bool look_due{false};  ///< it was lost, or could not be reached there, and may be elsewhere
  std::optional<std::chrono::steady_clock::time_point> looked;  ///< when a look began last
  std::chrono::milliseconds retry_pause{};  ///< before the last quick attempt; 0: none was needed
  bool retry_planned{false};
  static inline const char* name = "node";
};

/// Bound on ends of placed requests that wait for a supervisor; the oldest is given up.
inline constexpr std::size_t max_untold = 65536;
/// Bound on calls of frontends that the engine has not answered.
inline constexpr std::size_t max_pending_calls = 4096;

[[nodiscard]] local_node_actor::behavior_type node(
    local_node_actor::stateful_pointer<node_state_data> self, context_ptr context,
    engine_port_actor port, pool_manager_actor pool, node_drain_ptr drain);

}  // namespace troupe::actors
