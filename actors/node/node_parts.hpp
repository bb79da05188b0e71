#pragma once

/// The parts of the node's actor: one file each for its registration, its links, what frontends and
/// the engine request, and its report. Only the files of the node include this.

#include <cstdint>
#include <optional>
#include <string>

#include <caf/make_message.hpp>  // what result.hpp calls, and does not include
#include <caf/result.hpp>
#include <caf/typed_response_promise.hpp>

#include "troupe/actors/node/node.hpp"

namespace troupe::actors::node_parts {

using self_pointer = local_node_actor::stateful_pointer<node_state_data>;

// -- registration (node_registration.cpp)

/// Registers, after connecting to the supervisor where that is needed; nothing while it is asking.
void reach_supervisor(self_pointer self);
/// The node is unregistered until the supervisor is reached again.
void lost_supervisor(self_pointer self, const troupe::error& why);
/// The supervisor drains this node, or tells it to leave.
void take_order(self_pointer self, const drain_order& order);
/// A heartbeat to the supervisor, with our load.
void say_alive(self_pointer self);
void on_try_supervisor(self_pointer self);
void on_supervisor_looked(self_pointer self, supervisor_looked& order);

// -- failures that the engine reports (node_failure.cpp)

void on_engine_failed(self_pointer self, engine_failed& order);
void on_engine_recovered(self_pointer self);

// -- links (node_links.cpp)

/// The port asks for a link with a peer.
void on_need_link(self_pointer self, need_link& order);
void on_look_again(self_pointer self);
/// The supervisor publishes a membership: links with lives that are over end, those that were
/// waited for are made.
void adopt(self_pointer self, membership& fresh);
/// A peer dials.
[[nodiscard]] caf::result<link_reply> accept_link(self_pointer self, const link_request& request);
/// Tells the port that no link with the peer comes.
void answer_gone(node_state_data& st, const need_link& question, troupe::error why);

// -- crashes (node_crashes.cpp)

/// From now on the node hears of the end of its port and its pool manager.
void watch_essentials(self_pointer self);
/// True: it was one of these. Where it crashed the supervisor is told, links, placements and calls
/// end, and the node takes part no more.
[[nodiscard]] bool essential_ended(self_pointer self, const caf::down_msg& down);
/// Counts it: links with one life of a peer that crash too often are given up.
void link_crashed(self_pointer self, const node_state_data::known_link& link);
/// Why no link is made any more with this life of the peer; empty: it may be.
[[nodiscard]] std::optional<troupe::error> links_given_up(const node_state_data& st,
                                                          const std::string& peer,
                                                          std::uint64_t incarnation);

// -- requests: placements and calls (node_requests.cpp)

void on_start_place(self_pointer self, start_place& order);
void on_placed_ended(self_pointer self, placed_ended& order);
void on_call_answered(self_pointer self, call_answered& order);
/// A frontend calls the engine.
[[nodiscard]] caf::typed_response_promise<call_reply> take_call(self_pointer self,
                                                                call_request& request);
void fail_placements(node_state_data& st, const troupe::error& why);
void expire_placements(self_pointer self);
/// Ends of placed requests that waited for a supervisor.
void tell_untold(self_pointer self);
/// Calls whose frontend waits no longer: the engine may keep its answer, but not a place among
/// those that may be pending.
void expire_calls(node_state_data& st);

// -- report (node_report.cpp)

/// What `troupe status` shows of this node.
[[nodiscard]] caf::typed_response_promise<node_report> make_report(self_pointer self);
/// Answers those who wait for one with what is known so far.
void end_reports(node_state_data& st);

}  // namespace troupe::actors::node_parts
