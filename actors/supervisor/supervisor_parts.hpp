#pragma once

/// The parts of the supervisor's actor: one file each for the nodes of its cluster, the requests that
/// wait for a place, the drains, and shared code. Only the supervisor's files include this header.

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include <caf/message.hpp>
#include <caf/typed_event_based_actor.hpp>
#include <caf/typed_response_promise.hpp>
#include <spdlog/spdlog.h>

#include "troupe/actors/base/broadcast_budget.hpp"
#include "troupe/actors/logging.hpp"
#include "troupe/actors/membership/drains.hpp"
#include "troupe/actors/membership/event_log.hpp"
#include "troupe/actors/membership/name_leases.hpp"
#include "troupe/actors/supervisor/supervisor.hpp"

namespace troupe::actors::supervisor_parts {

struct supervisor_state;
using self_pointer = supervisor_actor::stateful_pointer<supervisor_state>;
using placement_promise = caf::typed_response_promise<placement>;

struct supervisor_state {
  static inline const char* name = "supervisor";

  struct peer {
    node_actor handle;
    std::uint64_t incarnation{0};
    std::string arrival;  ///< host, port and pid that it registered from, its replica and stage
  };
  struct pending_placement {
    placement_promise promise;
    std::string request;
  };

  self_pointer self{nullptr};
  std::optional<membership_table> table;
  std::optional<router> routes;
  std::optional<name_leases> claims;
  drain_list drains;
  std::chrono::milliseconds tick_interval{50};
  std::map<std::string, peer> peers;  ///< nodes that are told of changes
  std::set<std::string> not_updated;  ///< nodes that have not been sent the newest list
  std::string told_last;              ///< the last node that was sent a list
  struct {
    std::uint64_t epoch{0};
    std::size_t entries{0};
    caf::message message;
  } told;  ///< the last list
  broadcast_budget pace;
  std::shared_ptr<membership_store> store;
  std::shared_ptr<std::atomic<std::size_t>> nodes_there;     ///< may be null
  std::shared_ptr<std::atomic<std::uint64_t>> claims_asked;  ///< may be null
  std::uint64_t saved{0};  ///< epoch of the last record that the store was given
  steady_time saved_at{};
  std::unordered_map<ticket_id, pending_placement> waiting;
  event_log events;
  log_limiter refusals;
  log_limiter moves;
  log_limiter refused_registrations;
  log_limiter unplaced_requests;
  std::shared_ptr<spdlog::logger> log = logger("supervisor");

  // -- life cycle, and code that the parts share (supervisor.cpp)

  void start(self_pointer me, supervisor_options options);
  void tick();
  void stop();
  /// Called before nodes and claims are judged by the clock: excuses time in which the supervisor
  /// stood still and could hear nobody.
  void forgive_standstill();
  /// After every event: logs changes, places requests that can be placed now, tells the nodes.
  void act_on_changes();
  /// Keeps an event of interest to people for `troupe events`, and logs it.
  void note(std::string what, std::string node, std::uint64_t incarnation, std::uint64_t epoch,
            std::string text, spdlog::level::level_enum level = spdlog::level::info);
  void restore();
  void keep(steady_time now);
  void count_nodes();
  [[nodiscard]] steady_time now() const { return self->clock().now(); }

  // -- nodes (supervisor_nodes.cpp)

  name_lease claim(const name_request& claim);
  registration take_in(const registration_request& request, const node_actor& handle);
  heartbeat_ack heard(const heartbeat& beat);
  void node_ended(const caf::down_msg& down);
  void report(const node_transition& change);
  void broadcast();
  result<registration> register_node(const registration_request& request, const node_actor& handle);
  void forget_peer(const std::string& node);
  [[nodiscard]] std::string why_lost(const caf::error& reason) const;

  // -- requests for a place (supervisor_placements.cpp)

  void place(const placement_request& request, placement_promise promise);
  void deliver(std::vector<served_ticket> served);
  void report(const placement& where);
  void not_placed(const std::string& request, const error& why);

  // -- drains (supervisor_drains.cpp)

  drain_reply drain(const drain_request& request);
  drain_reply cancel_drain(const std::string& node);
  void judge_drains();
  /// Sends the order only to the life that it names.
  void order(const std::string& node, const drain_order& what);
  /// Returns the names, for messages.
  std::string order_all(const std::vector<node_life>& nodes, drain_step step);
};

/// The number of lines that a rate limit held back, as a suffix for the line that passed.
[[nodiscard]] std::string more_of(std::uint64_t held_back);

}  // namespace troupe::actors::supervisor_parts
