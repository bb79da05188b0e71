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
class node_core {
 public:
  using self_pointer = local_node_actor::stateful_pointer<node_slot>;

  node_core(self_pointer self, context_ptr context, engine_port_actor port, pool_manager_actor pool,
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

  /// Registers, after connecting to the supervisor where that is needed; nothing while it is asking.
  void reach_supervisor();
  void reach_where_it_is(std::uint64_t attempt);
  /// Whether a thread looks where the supervisor is: a `supervisor_looked` follows.
  [[nodiscard]] bool looks_for_it(std::uint64_t attempt);
  void on_supervisor_looked(supervisor_looked& order);
  void register_now(std::uint64_t attempt);
  void registration_came(const registration& answer);
  void asking_failed(const caf::error& why);
  /// The node is unregistered until the supervisor is reached again.
  void lost_supervisor(const troupe::error& why);
  void retry_soon();
  void on_try_supervisor();
  void give_up(const troupe::error& why);
  /// The supervisor drains this node, or tells it to leave.
  void take_order(const drain_order& order);
  /// A heartbeat to the supervisor, with our load.
  void say_alive();
  void say_unregistered(const troupe::error& why);
  [[nodiscard]] std::string asked_at() const;

  // -- failures that the engine reports (node_failure.cpp)

  void on_engine_failed(engine_failed& order);
  void on_engine_recovered();

  // -- links (node_links.cpp)

  /// The port asks for a link with a peer.
  void on_need_link(need_link& order);
  void on_look_again();
  /// The supervisor publishes a membership: links with lives that are over end, those that were
  /// waited for are made.
  void adopt(membership& fresh);
  /// A peer dials.
  [[nodiscard]] caf::result<link_reply> accept_link(const link_request& request);
  /// Tells the port that no link with the peer comes.
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

  /// From now on the node hears of the end of its port and its pool manager.
  void watch_essentials();
  /// True: it was one of these. Where it crashed the supervisor is told, links, placements and calls
  /// end, and the node takes part no more.
  [[nodiscard]] bool essential_ended(const caf::down_msg& down);
  void give_this_node_up(const troupe::error& why);
  /// Counts it: links with one life of a peer that crash too often are given up.
  void link_crashed(const known_link& link);
  /// Why no link is made any more with this life of the peer; empty: it may be.
  [[nodiscard]] std::optional<troupe::error> links_given_up(const std::string& peer,
                                                            std::uint64_t incarnation) const;
  [[nodiscard]] bool is_shown(const std::string& peer, std::uint64_t incarnation) const;

  // -- requests: placements and calls (node_requests.cpp)

  void on_start_place(start_place& order);
  void on_placed_ended(placed_ended& order);
  void on_call_answered(call_answered& order);
  /// A frontend calls the engine.
  [[nodiscard]] caf::typed_response_promise<call_reply> take_call(call_request& request);
  void fail_placements(const troupe::error& why);
  void fail_placement(operation_id operation, troupe::error why);
  void expire_placements();
  void give_back_placement(const std::string& request);
  void tell_ended(std::string request);
  /// Ends of placed requests that waited for a supervisor.
  void tell_untold();
  /// Calls whose frontend waits no longer: the engine may keep its answer, but not a place among
  /// those that may be pending.
  void expire_calls();

  // -- report (node_report.cpp)

  /// What `troupe status` shows of this node.
  [[nodiscard]] caf::typed_response_promise<node_report> make_report();
  void one_less(const std::shared_ptr<report_in_progress>& progress);
  /// Answers those who wait for one with what is known so far.
  void end_reports();

  const self_pointer self_;
  const context_ptr context_;
  const engine_port_actor port_;
  const pool_manager_actor pool_;
  const node_drain_ptr drain_;
  supervisor_actor supervisor_;
  caf::actor_addr watched_;  ///< the supervisor that we would hear the end of
  bool registered_{false};
  bool registering_{false};
  std::chrono::steady_clock::time_point asking_since_;  ///< while registering
  /// Attempts to register, those that failed counted twice: what is said to an earlier one does not
  /// count.
  std::uint64_t attempt_{0};
  bool replaced_{false};  ///< by another life of the node, or crashed: it is over
  errc refusal_code_{errc::stale_incarnation};  ///< why it is over
  std::string refusal_;                         ///< the last reason for not being registered
  std::optional<errc> refusal_said_;  ///< its kind, when that was logged; empty: registered
  log_limiter reminder_{std::chrono::seconds{30}};  ///< of a refusal that goes on
  membership members_;
  std::unordered_map<caf::actor_id, known_link> links_;
  std::map<std::string, link_crashes> crashed_links_;  ///< by peer
  /// Peers that the port needs and no membership has shown yet (or not their next life).
  std::vector<wanted_link> wanted_;
  std::unordered_map<std::uint64_t, pending_call> calls_;
  std::uint64_t next_call_{1};
  std::map<operation_id, pending_placement> placements_;  ///< that the supervisor has not answered
  /// Placed requests that ended while no supervisor could be told, oldest first.
  std::deque<std::string> untold_;
  /// Reports that somebody waits for.
  std::set<std::shared_ptr<report_in_progress>> reports_;
  std::uint64_t beats_{0};
  std::string failure_;  ///< that the engine reported, as heartbeats say it; empty: none
  /// Where it is asked. Empty: where the settings say.
  std::optional<found_supervisor> found_;
  bool look_due_{false};  ///< it was lost, or could not be reached there, and may be elsewhere
  std::optional<std::chrono::steady_clock::time_point> looked_;  ///< when a look began last
  std::chrono::milliseconds retry_pause_{};  ///< before the last quick attempt; 0: none was needed
  bool retry_planned_{false};
};

}  // namespace troupe::actors::nodes
