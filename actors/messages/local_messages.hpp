#pragma once

/// The messages between the actors of one process. These types never cross the network: CAF moves
/// them as they are, without serialising. Interfaces are in messages.hpp.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include <caf/allowed_unsafe_message_type.hpp>
#include <caf/replies_to.hpp>
#include <caf/typed_actor.hpp>

#include "troupe/actors/base/clock.hpp"
#include "troupe/actors/engine_types.hpp"
#include "troupe/actors/messages/movement.hpp"
#include "troupe/actors/messages/session_messages.hpp"
#include "troupe/actors/messages/source_changes.hpp"
#include "troupe/actors/messages/types.hpp"
#include "troupe/actors/supervisor_begin.hpp"
#include "troupe/kvcache/layout.hpp"
#include "troupe/kvcache/plan.hpp"
#include "troupe/transport/backend.hpp"
#include "troupe/transport/endpoint.hpp"

namespace troupe::actors {

// -- to the actor of one session

/// link -> session, or runner where the link's actor has ended: the requested fence holds.
struct transfer_fenced {};
/// link, runner -> session: the link is gone, or the peer is lost.
struct link_is_lost {
  troupe::error why;
};
/// link -> session: the link broke and was rebuilt. Earlier messages and batches may or may not
/// have arrived; further orders to the link name this epoch.
struct link_is_back {
  std::uint64_t epoch{0};
  std::string backend{};  ///< the present one
};
/// runner, link -> session: the engine gave the transfer up, or the link could not send a
/// message of the session.
struct abort_session {
  troupe::error why;
  bool refused{false};  ///< decode: because another source of the receive refused it
};
/// runner -> session: look at the clock, the deadline has come.
struct deadline_reached {};
/// runner -> decode session: the bytes of every source are here; your source may be released.
struct receive_is_whole {};

struct session_event {
  std::variant<session_message, transport::completion, transfer_fenced, link_is_lost, link_is_back,
               source_progress, source_blocks, source_sealed, abort_session, deadline_reached,
               receive_is_whole>
      what;
};

/// Serves one `session`: a side of a transfer, a keyed value, or a word to a source.
using session_actor = caf::typed_actor<
    // link, runner -> session
    caf::reacts_to<session_event>>;

// -- to the actor of one link

/// Part of one of our regions that the peer is to be granted access to.
struct grant_wish {
  region_id region;
  byte_set permitted;
  transport::access rights{transport::access::read};
};

/// session -> link: deliver everything that concerns this transfer to me.
struct attach_session {
  transfer_id transfer;
  session_actor session;
  std::uint64_t epoch{0};  ///< known to the session; if it is over, `link_is_back` follows
};
/// session -> link: forget the transfer; messages that arrive for it later are dropped.
struct detach_session {
  transfer_id transfer;
};
/// session, runner -> link: give these grants, put them into the message, send it. If that
/// fails the session gets `abort_session`, or `link_is_lost` if the link has ended.
struct say {
  session_message message;
  std::vector<grant_wish> grants;
  bool may_be_delayed{false};  ///< may travel with later frames, see `transport::link::send_soon`
  /// The epoch in the link's handle. Messages of an epoch that is over are not sent, except the
  /// last words of a transfer, which hold in any epoch. 0: valid in any epoch.
  std::uint64_t epoch{0};
};
/// session -> link: move these bytes; ends as a completion.
struct post_batch {
  transport::batch work;
  std::uint64_t epoch{0};  ///< a batch of an epoch that is over is dropped
};
/// session -> link: fence the transfer. Answered by `transfer_fenced` once nothing of it can touch
/// memory any more.
struct fence_now {
  transfer_id transfer;
};
/// node -> link: this node no longer takes part in the cluster; the link ends at once.
struct close_link {
  troupe::error why;
};
/// node -> link: the node stops in good order; the link ends once the peer knows.
struct leave_link {
  troupe::error why;
};
/// node -> link: the peer's process has left or is down; its earlier messages still count.
struct peer_left {
  troupe::error why;
};
/// link -> itself, some time after the peer has left: read the peer's last frames.
struct read_last_frames {
  troupe::error why;
  std::uint32_t looks{0};          ///< so far
  std::uint32_t found_nothing{0};  ///< how many of the latest looks in a row found nothing
};
/// link -> itself, after a pause: reach for the peer, or try the backend that failed, once more.
struct dial_again {};
/// link -> itself, acceptor: the peer should have dialled by now.
struct look_for_dialler {
  std::uint64_t alarm{0};  ///< only the latest alarm counts
};

/// link -> itself, after a pause while messages wait for room for their grants.
struct look_for_room {};
/// link -> itself, periodically while something is in flight: does the peer live?
struct check_peer_alive {};

struct link_command {
  std::variant<attach_session, detach_session, say, post_batch, fence_now, close_link, leave_link,
               peer_left, read_last_frames, dial_again, look_for_dialler, look_for_room,
               check_peer_alive>
      what;
};

// Reports of the transport come from the thread that made the progress.

/// transport -> link: both ends may use the transport link.
struct link_came_up {};
/// transport -> link: the transport link cannot be used any more.
struct link_broke {
  troupe::error why;
};
/// transport -> link: a fence that `fence_now` asked for holds.
struct fence_holds {
  transfer_id transfer;
  std::uint64_t generation{0};  ///< valid even after the transport link has been replaced
};
struct link_event {
  /// Of the transport link that reports. Events of a replaced one are ignored, except its fences.
  std::uint64_t generation{0};
  std::variant<link_came_up, session_message, transport::completion, fence_holds, link_broke> what;
};

/// Owns one connection to one incarnation of a peer.
using link_actor = caf::typed_actor<
    // sessions, runner, node -> link
    caf::reacts_to<link_command>,
    // the transport -> link
    caf::reacts_to<link_event>,
    // the peer's node, later its link -> link, acceptor only: the peer's half; the reply is ours
    caf::replies_to<link_request>::with<link_reply>,
    // the peer's link -> link: news that its transport may not be able to tell
    caf::reacts_to<link_notice>,
    // node -> link
    caf::replies_to<report_atom>::with<link_report>>;

/// A link as its users see it, once it is up.
struct link_handle {
  std::string peer;  ///< node name
  incarnation peer_incarnation;
  std::shared_ptr<const kvcache::cache_layout>
      peer_layout;  ///< null until the peer registered a cache
  link_actor actor;
  std::uint64_t epoch{0};  ///< grows each time the link is rebuilt
  std::string backend{};   ///< such as "shm"; may change when the link is rebuilt
  std::uint64_t id{0};     ///< of the link's actor
};

// -- to the runner

/// link -> runner: the link can be used. Sent before any other message of the link, and again
/// each time the link was rebuilt.
struct link_ready {
  link_handle link;
};
/// link -> runner: the peer has left. The link reads the last frames and ends: nothing new may
/// begin over it.
struct link_draining {
  std::string peer;
  std::uint64_t peer_incarnation{0};
  std::uint64_t link{0};  ///< id of the link's actor
};
/// link -> runner: the link that was being made failed, or an up one is gone (sessions were
/// told).
struct link_gone {
  std::string peer;
  std::uint64_t peer_incarnation{0};
  std::uint64_t link{0};   ///< id of the link's actor; 0: none was made
  std::uint64_t asked{0};  ///< the `need_link::ask` that this answers; 0: the peer dialled
  troupe::error why;
};
/// link -> runner: a message that belongs to no attached session.
struct unrouted_message {
  link_handle link;
  session_message message;
};
/// decode_receiver -> runner: these layers have arrived from this source.
struct session_layers {
  transfer_id transfer;
  cache_slice slice;
};
/// session -> runner: the one outcome of the session.
struct session_concluded {
  transfer_id transfer;
  std::optional<troupe::error> failure;
  std::vector<std::byte> aux;
  std::uint64_t bytes{0};
  seen_movement moved{};
  bool refused{false};  ///< on failure: the request was refused, the source is sound
};
/// session -> runner: nothing of the session can touch our memory any more. Its last message.
struct session_unpinned {
  transfer_id transfer;
};

/// value_client -> runner: the outcome of a put, get, query or remove. `session_unpinned`
/// follows once the peer can no longer touch our memory.
struct value_concluded {
  operation_id operation;
  std::variant<event_done, event_failed, event_value, event_info> outcome;
};
/// pool_manager -> runner: the answer to a wait in line.
struct blocks_granted {
  operation_id operation;
  result<kvcache::allocation> blocks;
};
/// transport -> runner: the GPU reached the point that a `send_progress` names, or never will.
struct gpu_point_reached {
  operation_id send;
  std::uint64_t point{0};
  std::optional<troupe::error> failure;
};

struct runner_event {
  std::variant<link_ready, link_draining, link_gone, unrouted_message, session_layers,
               session_concluded, session_unpinned, value_concluded, blocks_granted,
               gpu_point_reached>
      what;
};

/// node -> runner: the newest membership.
struct membership_changed {
  std::shared_ptr<const membership> members;
};
/// node -> runner: the supervisor's answer to a heartbeat.
struct heartbeat_answered {
  std::uint64_t supervisor_incarnation{0};
  std::uint64_t epoch{0};
  time_point asked;  ///< when the heartbeat was sent
};
struct node_notice {
  std::variant<membership_changed, heartbeat_answered> what;
};

// -- to the pool manager

/// runner -> pool: stand in line for blocks; ends as `blocks_granted`.
struct wait_for_blocks {
  operation_id operation;
  std::uint32_t count{0};
  time_point deadline;
};
/// runner -> pool: the waiting operation has given up.
struct leave_line {
  operation_id operation;
};
/// cache_pool, runner, value_server -> pool: blocks came back while an operation waits, or a value
/// that expires was stored.
struct pool_changed {};
struct pool_command {
  std::variant<wait_for_blocks, leave_line, pool_changed> what;
};

// -- to the node

/// runner -> node: make or find the link with this node; ends as `link_ready` or `link_gone`.
struct need_link {
  std::string peer;
  std::uint64_t former_life{0};  ///< has left, which the membership may not show yet
  std::uint64_t ask{0};          ///< number of the runner's request; the answer names it
};
/// node -> itself: look again whether a peer that was down has come back.
struct look_again {};
/// engine -> node: ask the supervisor for a placement; ends as an event of the engine.
struct start_place {
  operation_id operation;
  placement_request request;
};
/// engine -> node: a placed request ended; tell the supervisor.
struct placed_request_ended {
  std::string request;
};
/// engine -> node: its answer to a frontend's call.
struct call_answered {
  std::uint64_t call{0};
  call_reply reply;
};
/// engine -> node: leave the cluster and end the links.
struct stop_node {};
/// node -> itself: see whether the supervisor is back.
struct try_supervisor {};
/// node -> itself, from the thread that looked: where the supervisor is, or why that is unknown.
struct supervisor_looked {
  std::uint64_t attempt{0};  ///< the attempt that the search was for
  result<found_supervisor> found;
};
/// engine -> node: the engine cannot serve anybody, and why.
struct engine_failed {
  std::string why;
};
/// engine -> node: the engine can serve again.
struct engine_recovered {};
struct node_command {
  std::variant<need_link, look_again, start_place, placed_request_ended, call_answered, stop_node,
               try_supervisor, supervisor_looked, engine_failed, engine_recovered>
      what;
};

// -- to the runner, from the engine

/// engine -> runner: begin a send.
struct start_send {
  operation_id operation;
  send_spec spec;
};
/// engine -> runner: a send has more blocks.
struct send_grew {
  operation_id operation;
  source_blocks more;  ///< pinned, if the node has a pool
};
/// engine -> runner: these layers of a send are computed.
struct send_progress {
  operation_id operation;
  source_progress progress;
  std::uint64_t point{0};  ///< point of the GPU from which on this is true; 0: now
};
/// engine -> runner: a send is complete.
struct send_sealed {
  operation_id operation;
  source_sealed seal;
};
/// engine -> runner: begin a receive.
struct start_receive {
  operation_id operation;
  receive_spec spec;
};
/// engine -> runner: open the gate of a stream when these layers are complete or the receive ends.
struct open_when_complete {
  operation_id operation;
  std::uint32_t layer_begin{0}, layer_end{0}, token_end{0};
  std::shared_ptr<transport::stream_gate> gate;
};
/// engine -> runner: end an operation with `aborted`.
struct abort_operation {
  operation_id operation;
  std::string reason;
};
enum class value_verb : std::uint8_t { put, get, query, remove };
/// engine -> runner: put, get, query or remove a value.
struct start_value {
  operation_id operation;
  std::string peer;
  value_verb verb{value_verb::get};
  std::string key;
  std::span<const std::byte> value;  ///< of a put, in the engine's memory until the outcome
  std::uint64_t ttl_ms{0};           ///< of a put
  /// Holds the bytes that `value` shows if the engine's own are in memory of a GPU.
  std::shared_ptr<const std::vector<std::byte>> copy{};
  std::vector<block_id> pinned{};  ///< blocks of the node's pool that `value` lies in
};
/// What a decode engine can tell the sources of a request without a receive.
enum class source_verb : std::uint8_t { release, hold };
/// engine -> runner: tell the sources of a request to release or hold it.
struct start_word {
  operation_id operation;
  source_verb verb{source_verb::release};
  std::string request;
  std::vector<std::string> sources;
  std::vector<std::uint64_t> lives;  ///< incarnations of the sources, or empty
};
/// engine -> runner, before all else: the actors that the runner may ask.
struct connect_operations {
  caf::typed_actor<caf::reacts_to<node_command>> node;
  caf::typed_actor<caf::reacts_to<pool_command>> pool;
};
/// engine -> runner: the node stops; end everything with `aborted`.
struct stop_runner {};

struct engine_command {
  std::variant<start_send, send_grew, send_progress, send_sealed, start_receive, open_when_complete,
               abort_operation, start_value, start_word, connect_operations, stop_runner>
      what;
};

struct transfer_reports {
  std::vector<transfer_report> transfers;
  std::uint64_t waiting_for_link{0};  ///< operations
  std::vector<parked_report> parked;
};

}  // namespace troupe::actors

CAF_ALLOW_UNSAFE_MESSAGE_TYPE(troupe::actors::engine_command)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(troupe::actors::pool_command)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(troupe::actors::node_command)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(troupe::actors::transfer_reports)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(troupe::actors::session_event)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(troupe::actors::link_command)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(troupe::actors::link_event)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(troupe::actors::node_notice)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(troupe::actors::runner_event)
