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
#include <vector>

#include <caf/make_message.hpp>  // what result.hpp calls, and does not include
#include <caf/result.hpp>
#include <caf/typed_event_based_actor.hpp>
#include <caf/typed_response_promise.hpp>

#include "troupe/actors/base/restart_intensity.hpp"
#include "troupe/actors/logging.hpp"
#include "troupe/actors/node/node.hpp"

namespace troupe::actors::nodes {

struct report_in_progress;

/// The cluster side of a node: registers, sends heartbeats, keeps the last membership, makes links
/// on demand, accepts links and calls. The one published actor of its process. Registers after its
/// first tick, which comes when the port is bound.
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
///   registered    the engine reports a failure    registered    beats at once; each beat says so
///   registered    the engine has recovered        unregistered  registers again without failure
///   any           drain_order                     the same      still takes on what comes;
///                                                               `node_drain` has its own table
///   any           its runner or pool manager      over          tells the supervisor why, closes its
///                 crashed
///                                                               links, fails placements and calls
///   any           stop_node                       -             leaves, closes links, quits
class node_core {
 public:
  using self_pointer = local_node_actor::stateful_pointer<node_slot>;

  node_core(self_pointer self, context_ptr context, runner_actor runner, pool_manager_actor pool,
            node_drain_ptr drain);
  node_core(const node_core&) = delete;
  node_core& operator=(const node_core&) = delete;

  [[nodiscard]] local_node_actor::behavior_type begin();

 private:
  struct known_link {
    std::string peer;
    std::uint64_t incarnation{0};
    link_actor actor;
    std::uint64_t asked{0};               ///< `need_link::ask`; 0: the peer dialled
    registration_state::mark registered;  ///< when the peer's life was admitted, as far as known
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
    bool asks{false};  ///< the supervisor was asked and has not answered yet
  };
  struct pending_call {
    caf::typed_response_promise<call_reply> promise;
    time_point deadline;
  };
  struct pending_placement {
    std::string request;
    time_point deadline;  ///< of the supervisor's answer
  };

  void beat();
  void on_stop_node();
  void child_ended(const caf::down_msg& down);

  // -- registration (node_registration.cpp)

  /// Registers, after connecting to the supervisor if needed; no effect while it is registering.
  void reach_supervisor();
  void reach_where_it_is(std::uint64_t attempt);
  /// Whether a thread looks for the supervisor; a `supervisor_looked` follows.
  [[nodiscard]] bool looks_for_it(std::uint64_t attempt);
  void on_supervisor_looked(supervisor_looked& order);
  void register_now(std::uint64_t attempt);
  void registration_came(const registration& answer);
  void asking_failed(const caf::error& why);
  /// Makes the node unregistered until the supervisor is reached again.
  void lost_supervisor(const troupe::error& why);
  void retry_soon();
  void on_try_supervisor();
  void give_up(const troupe::error& why);
  /// The supervisor drains this node, or tells it to leave.
  void take_order(const drain_order& order);
  /// Sends a heartbeat with our load to the supervisor.
  void say_alive();
  void say_unregistered(const troupe::error& why);
  [[nodiscard]] std::string asked_at() const;

  // -- failures that the engine reports (node_failure.cpp)

  void on_engine_failed(engine_failed& order);
  void on_engine_recovered();

  // -- links (node_links.cpp)

  /// The runner asks for a link with a peer.
  void on_need_link(need_link& order);
  /// The supervisor published a membership: ends links with lives that are over, and makes the
  /// links that waited for it.
  void adopt(membership& fresh);
  /// A peer dials.
  [[nodiscard]] caf::result<link_reply> accept_link(const link_request& request);
  /// Tells the runner that no link with the peer comes.
  void answer_gone(const need_link& question, troupe::error why);
  link_actor spawn_link(node_info peer, std::uint64_t asked, registration_state::mark registered);
  void close_links_of(const node_info& peer, const troupe::error& why);
  [[nodiscard]] bool make_link(const wanted_link& wanted);
  void make_wanted_links();
  void ask_for_news(const std::string& peer);
  [[nodiscard]] std::uint64_t shown_life(const std::string& peer) const;
  [[nodiscard]] bool was_replaced(const std::string& peer, std::uint64_t incarnation,
                                  registration_state::mark by) const;
  [[nodiscard]] std::optional<troupe::error> former_life(const link_request& request) const;

  // -- crashes (node_crashes.cpp)

  /// Has the node hear of the end of its runner and its pool manager from now on.
  void watch_essentials();
  /// Returns whether `down` is one of these. After its crash the supervisor is told, links,
  /// placements and calls end, and the node takes part no more.
  [[nodiscard]] bool essential_ended(const caf::down_msg& down);
  void give_this_node_up(const troupe::error& why);
  /// Counts a crash: links with one life of a peer that crash too often are given up.
  void link_crashed(const known_link& link);
  /// Why no more links are made with this life of the peer. Empty if they are.
  [[nodiscard]] std::optional<troupe::error> links_given_up(const std::string& peer,
                                                            std::uint64_t incarnation) const;

  // -- requests: placements and calls (node_requests.cpp)

  void on_start_place(start_place& order);
  void on_call_answered(call_answered& order);
  /// A frontend calls the engine.
  [[nodiscard]] caf::typed_response_promise<call_reply> take_call(call_request& request);
  void fail_placements(const troupe::error& why);
  void fail_placement(operation_id operation, troupe::error why);
  void expire_placements();
  void give_back_placement(const std::string& request);
  void tell_placed_request_ended(std::string request);
  /// Tells the supervisor of placed requests that ended while it could not be told.
  void tell_untold();
  /// Ends calls whose frontend no longer waits: the engine may keep the call to answer, but it does
  /// not count as pending any more.
  void expire_calls();

  // -- report (node_report.cpp)

  /// What `troupe status` shows of this node.
  [[nodiscard]] caf::typed_response_promise<node_report> make_report();
  void one_less(const std::shared_ptr<report_in_progress>& progress);
  /// Answers all pending reports with what is known so far.
  void end_reports();

  const self_pointer self_;
  const context_ptr context_;
  const runner_actor runner_;
  const pool_manager_actor pool_;
  const node_drain_ptr drain_;
  supervisor_actor supervisor_;
  caf::actor_addr watched_;  ///< the supervisor that this actor monitors
  bool registered_{false};
  bool registering_{false};
  std::chrono::steady_clock::time_point asking_since_;  ///< while registering
  /// Attempts to register, each failure counted as well: an answer to an earlier one is ignored.
  std::uint64_t attempt_{0};
  bool replaced_{false};  ///< over: replaced by another life of the node, or crashed
  errc refusal_code_{errc::stale_incarnation};  ///< why it is over
  std::string refusal_;                         ///< the last reason why it was not registered
  std::optional<errc> refusal_said_;  ///< code of the refusal logged last; empty: registered
  log_limiter reminder_{std::chrono::seconds{30}};  ///< of a refusal that persists
  membership members_;
  std::unordered_map<caf::actor_id, known_link> links_;
  std::map<std::string, link_crashes> crashed_links_;  ///< by peer
  /// Links that the runner asked for and whose peers (or their next lives) no membership shows yet.
  std::vector<wanted_link> wanted_;
  std::unordered_map<std::uint64_t, pending_call> calls_;
  std::uint64_t next_call_{1};
  std::map<operation_id, pending_placement> placements_;  ///< not answered by the supervisor yet
  /// Placed requests that ended while no supervisor could be told, oldest first.
  std::deque<std::string> untold_;
  std::set<std::shared_ptr<report_in_progress>> reports_;
  std::uint64_t beats_{0};
  std::string failure_;  ///< as the engine reported it, sent in heartbeats; empty: none
  /// Where the supervisor was found. Empty: where the settings say.
  std::optional<found_supervisor> found_;
  bool look_due_{false};  ///< the supervisor was lost or unreachable, and may be elsewhere
  std::optional<std::chrono::steady_clock::time_point> looked_;  ///< when the last look began
  std::chrono::milliseconds retry_pause_{};  ///< before the last quick attempt; 0: there was none
  bool retry_planned_{false};
};

}  // namespace troupe::actors::nodes
