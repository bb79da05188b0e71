#pragma once

/// The parts of the engine port: one file each for the sources of the prefill side, the receives of
/// the decode side, keyed values, and what they share. Only the files of the port include this.

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "troupe/actors/port/engine_port.hpp"

namespace troupe::actors::port {

using self_pointer = engine_port_actor::stateful_pointer<engine_port_state>;
using timer = engine_port_state::timer;

/// Of a session that only its peer's liveness bounds.
constexpr auto no_deadline = time_point::max();
/// A longer one is none; the clock's own unit would overflow.
constexpr std::chrono::milliseconds longest_time = std::chrono::hours{24 * 365};

// -- shared (engine_port_sessions.cpp)

[[nodiscard]] time_point now();
[[nodiscard]] time_point deadline_after(const engine_port_state& st,
                                        std::chrono::milliseconds wanted);
void forget_deadline(engine_port_state& st, time_point when, timer what, std::uint64_t id);
[[nodiscard]] transfer_id new_transfer(engine_port_state& st);
/// The mapping between our cache and the peer's, made once per peer.
/// `overloaded` where no more may be served of what peers ask for.
[[nodiscard]] result<void> room_to_serve(const engine_port_state& st);
[[nodiscard]] result<std::shared_ptr<const kvcache::transfer_geometry>> geometry(
    engine_port_state& st, const link_handle& link, kvcache::data_flow flow);
/// A session lives from here on; it is told of its deadline, and of the end of its link.
void session_begins(engine_port_state& st, operation_id operation, transfer_id transfer,
                    session_actor session, const link_handle& link, transfer_report report,
                    time_point deadline);
void session_ends(engine_port_state& st, transfer_id transfer);
/// A message that its link does not know the session of: it came right behind the one that the session
/// was spawned for, or over the link that was made again since.
void pass_on(const live_session& session, const link_handle& link, session_message message);
/// What heartbeats say: those that have crashed hold their pins, and will never end.
void count_sessions(engine_port_state& st);
void tell_session(engine_port_state& st, transfer_id transfer, session_event event);
/// The outcome of an operation that has no event behind it. False: it was told before.
bool tell_last_outcome(engine_port_state& st, operation_id operation,
                       decltype(value_concluded::outcome) outcome);
/// The one outcome of an operation. False: it was told before.
bool tell_outcome(engine_port_state& st, operation_id operation,
                  std::variant<event_done, event_failed> outcome);
void count_outcome(engine_port_state& st, const std::optional<troupe::error>& failure,
                   std::uint64_t bytes);
/// The operation goes on with `link_ready`, or ends with `link_gone`.
void wait_for_link(engine_port_state& st, const std::string& peer, operation_id operation);
/// An operation that has ended leaves the line.
void leave_link_line(engine_port_state& st, const std::string& peer, operation_id operation);
/// What `troupe status` shows of a session; its transfer is filled in when it begins.
[[nodiscard]] transfer_report report_of(const std::string& request, const link_handle& link,
                                        std::string_view side, std::string_view state);
/// Blocks that the operation had pinned, so that it cannot fail while the bookkeeping is right.
void unpin_blocks(engine_port_state& st, const std::string& request,
                  std::span<const block_id> blocks);
void refuse_request(const link_handle& link, transfer_id transfer, const troupe::error& why);
/// The same where the source does not have what is asked for: nobody's send fails by it.
void refuse_alone(const link_handle& link, transfer_id transfer, const troupe::error& why);

// -- sources, prefill side (engine_port_sources.cpp)

void on_start_send(self_pointer self, start_send& order);
void on_send_grew(self_pointer self, send_grew& order);
void on_send_progress(self_pointer self, send_progress& order);
void on_send_sealed(self_pointer self, send_sealed& order);
void on_gpu_point_reached(self_pointer self, gpu_point_reached& news);
/// A decode rank asks; its request meets its source, or is parked until that comes.
void request_came(self_pointer self, const link_handle& link, transfer_request request);
/// What a request is told that waits no longer for its source.
[[nodiscard]] troupe::error not_offered(const std::string& request);
/// Takes requests out of the parking lot that `gone` says are over.
void drop_parked(engine_port_state& st, const std::function<bool(const parked_request&)>& gone);
/// The same among those for one request, and among those of one transfer.
void drop_parked_for(engine_port_state& st, const std::string& request,
                     const std::function<bool(const parked_request&)>& gone);
void drop_parked_of(engine_port_state& st, transfer_id transfer,
                    const std::function<bool(const parked_request&)>& gone);
/// Which replica of which stage a node is a rank of; empty while the membership does not have it.
[[nodiscard]] std::string replica_of(const engine_port_state& st, const std::string& node);
/// Where nobody is missing any more, the ranks have the time that the engine gave.
void lengthen_if_filled(engine_port_state& st, operation_id operation, source& src);
/// The membership is another one: ranks whose replica was not known may be placed now, and with them a source
/// be done.
void place_ranks(self_pointer self);
void conclude_source(self_pointer self, operation_id operation,
                     std::optional<troupe::error> failure, const session_event& to_senders);
void sender_concluded(self_pointer self, operation_id operation, session_concluded& outcome);
/// One of the decode ranks that take it failed, which ends the source or leaves a place open.
void rank_failed(self_pointer self, operation_id operation, transfer_id transfer,
                 troupe::error why);
/// One that it was for is gone. Its place waits for another for `retry_window`, where there is one.
void place_lost(self_pointer self, operation_id operation, source& src, troupe::error why);
/// Lets go of a concluded source once its last sender has unpinned.
void release_source(self_pointer self, operation_id operation);

// -- receives, decode side (engine_port_receives.cpp)

void on_start_receive(self_pointer self, start_receive& order);
void on_open_when_complete(self_pointer self, open_when_complete& order);
void on_blocks_granted(self_pointer self, blocks_granted& granted);
void on_session_layers(self_pointer self, session_layers& layers);
/// Starts what can be of a receive whose blocks are there: from each source whose link is up; the others'
/// links are asked for. Sources that hold parts of a model start together, once it is known that each layer
/// is held by one.
void start_receivers(self_pointer self, operation_id operation);
void conclude_receive(self_pointer self, operation_id operation,
                      std::optional<troupe::error> failure, const session_event& to_receivers);
void fail_receive(self_pointer self, operation_id operation, troupe::error why);
void receiver_concluded(self_pointer self, operation_id operation, session_concluded& outcome);
/// Lets go of a concluded receive once its last receiver has unpinned.
void release_receive(self_pointer self, operation_id operation);

// -- words to sources without a receive, both sides (engine_port_words.cpp)

void on_start_word(self_pointer self, start_word& order);
void start_word_to(self_pointer self, operation_id operation, const link_handle& link);
/// There is no link with that source.
void word_cannot_come(self_pointer self, operation_id operation, const std::string& peer,
                      const troupe::error& why);
void word_concluded(self_pointer self, operation_id operation, session_concluded& outcome);
void conclude_words(self_pointer self, operation_id operation, std::optional<troupe::error> failure,
                    const session_event& to_sessions);
/// Every source of the request was asked for it: nobody need hold them any more.
void end_own_hold(self_pointer self, const std::string& request);
/// A decode node holds a source, or gives it back.
void hold_came(self_pointer self, const link_handle& link, const transfer_hold& word);
void forget_came(self_pointer self, const link_handle& link, const transfer_forget& word);
/// The source has ended; `failure` empty: it was delivered.
void tell_holders(engine_port_state& st, source& src, const std::optional<troupe::error>& failure);
void end_hold(engine_port_state& st, transfer_id transfer);
/// Those that came over a link which has ended.
void end_holds_over(engine_port_state& st, caf::actor_id link);

// -- leases (engine_port_leases.cpp)

void on_membership_changed(self_pointer self, membership_changed& news);
void on_heartbeat_answered(self_pointer self, heartbeat_answered& news);
/// Ends what is held for, or from, nodes that do not live.
void lapsed(self_pointer self, const std::vector<cache_leases::lapse>& lapses);
/// Something is held from now on: it is looked after once per beat.
void watch_leases(engine_port_state& st);
void lease_beat(self_pointer self);

// -- keyed values (engine_port_values.cpp)

void on_start_value(self_pointer self, start_value& order);
void on_value_concluded(self_pointer self, value_concluded& outcome);
void start_client(self_pointer self, waiting_value value, const link_handle& link);
/// The end of one that has no client, or whose client is not to be waited for.
void fail_value(engine_port_state& st, operation_id operation, troupe::error why);
/// The end of one whose actor, or whose link's, crashed: nobody knows any more what became of it.
void lose_value(engine_port_state& st, operation_id operation, troupe::error why);
/// Nobody can read any more what the operation puts.
void unpin_value(engine_port_state& st, operation_id operation);
/// Takes a value's operation out of the line for its link; nothing if it is not in one.
[[nodiscard]] std::optional<waiting_value> no_longer_waits(engine_port_state& st,
                                                           operation_id operation);
/// A peer asks for something of our values.
void value_came(self_pointer self, const link_handle& link, session_message& message);

}  // namespace troupe::actors::port
