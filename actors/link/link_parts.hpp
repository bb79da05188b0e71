#pragma once

/// The parts of the link's actor: one file each for dialling, what both sides tell each other before
/// they connect, the transport below, the sessions above, the watch over the peer, and its end. Only
/// the files of the link include this.

#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include "troupe/actors/link/link.hpp"

namespace troupe::actors::link_parts {

using self_pointer = link_actor::stateful_pointer<link_state>;

// -- dialling (link_dial.cpp)

[[nodiscard]] time_point now();
/// Reaches the peer's node; the backends follow.
void dial(self_pointer self);
void on_dial_again(self_pointer self);
/// An attempt with the chosen backend failed: again, or the next one, or the end.
void backend_failed(self_pointer self, const troupe::error& why);
/// The peer's end, which was asked, has ended with the attempt before: this one has not begun.
void ask_node_instead(self_pointer self);

// -- handshake: what both sides tell each other before they connect (link_handshake.cpp)

[[nodiscard]] bytes to_bytes(std::span<const std::byte> from);
[[nodiscard]] std::vector<std::byte> from_bytes(const bytes& from);
/// The peer's cache must fit ours.
[[nodiscard]] result<void> adopt_layout(link_state& st, const bytes& encoded);
/// GPUs that a node may name for its cache.
inline constexpr std::size_t max_cache_gpus = 64;
/// Those that hold this node's cache, as a peer is told: what else its process sees does not matter.
[[nodiscard]] std::vector<std::string> cache_gpus(const node_context& context);
/// Those that the peer names for its cache. `out_of_range`: too many, or what is no bus id.
[[nodiscard]] result<void> adopt_gpus(link_state& st, const std::vector<std::string>& named);
/// Why this backend cannot serve this pair of nodes, from what the peer has said so far: of its host
/// when it registered, of its cache when the link is made. Empty if it can.
[[nodiscard]] std::optional<troupe::error> in_the_way(const link_state& st,
                                                      transport::backend_kind kind);
/// Whether the chosen backend joins this node with the peer, whose cache is on those GPUs. Each side
/// judges it for itself.
[[nodiscard]] result<void> judge(const link_state& st, const std::vector<std::string>& gpus);
/// A peer dials: the accepting side's answer.
[[nodiscard]] link_reply accept(self_pointer self, const link_request& request);

// -- transport (link_transport.cpp)

/// Opens a transport link of the chosen kind with a sink that reports to this actor.
[[nodiscard]] result<void> open_transport(self_pointer self);
/// Whether a failure is one of the whole link, not of what was asked of it.
[[nodiscard]] bool means_broken(const troupe::error& why);
void on_link_came_up(self_pointer self);
void on_session_message(self_pointer self, session_message message);
void on_completion(self_pointer self, transport::completion done);
/// Also of a former transport link.
void on_fence_holds(self_pointer self, const fence_holds& fence);
void on_link_broke(self_pointer self, link_broke broke);

// -- sessions (link_sessions.cpp)

void on_say(self_pointer self, say order);
void on_post_batch(self_pointer self, post_batch order);
void on_fence_now(self_pointer self, const fence_now& order);
void on_attach_session(self_pointer self, attach_session order);
void on_detach_session(self_pointer self, const detach_session& order);
/// What was to be said is not: the link is broken, or its session hears why.
void failed_to_say(self_pointer self, transfer_id transfer, const troupe::error& why);
/// Tells the session of a transfer, if it is attached.
void to_session(link_state& st, transfer_id transfer, session_event event);

// -- grants (link_room.cpp)

/// Says it when there is room for its grants.
void say_with_grants(self_pointer self, say order);
/// Room has come, perhaps.
void serve_room(self_pointer self);
/// Batches that the transport has room for by now.
void post_waiting(self_pointer self);
/// Nothing is wanted for the transfer any more.
void leave_room(link_state& st, transfer_id transfer);
void on_look_for_room(self_pointer self);

// -- made again (link_rebuild.cpp)

/// The transport broke while the link was up: it is made again, unless the peer has left.
void break_link(self_pointer self, const troupe::error& why);
/// Takes the transport away. Sessions are fenced on it, and it stays until those fences hold.
void retire_transport(link_state& st);
/// The acceptor waits for the dialling side, and not for ever.
void wait_for_dialler(self_pointer self);
/// What sessions hear of a link that is up again.
[[nodiscard]] link_is_back is_back(const link_state& st);
/// It is up again: last words first, then the sessions.
void resume_sessions(link_state& st);
/// Keeps the frame of a last word.
void remember(link_state& st, transfer_id transfer, std::vector<std::byte> frame);
/// Says the last words on a transfer again. False: there are none.
bool repeat_words(link_state& st, transfer_id transfer);
/// What is said when no attempt is left.
[[nodiscard]] troupe::error given_up(const link_state& st, const troupe::error& last);
/// The peer's actor of this link, as it is known from its first words: its end is watched.
void meet(self_pointer self, const caf::strong_actor_ptr& other);
void on_look_for_dialler(self_pointer self, const look_for_dialler& order);
void hear(self_pointer self, const link_notice& notice);
/// The peer's actor of this link has ended, and its process lives: the end of this attempt, or of the
/// link. `is_gone`: no answer of it comes any more.
void other_end_ended(self_pointer self, std::string why, bool is_gone);

// -- whether the peer lives (link_watch.cpp)

/// The link is up: tells the peer what it must know of this process to judge its silence.
void introduce(const link_state& st);
/// Begins to look if there is reason to and nobody does: after whatever may have given one.
void watch(self_pointer self);
void on_check_peer_alive(self_pointer self);
/// Takes what has come over the link and nobody has taken yet, at most `frames` of it.
void read_out(link_state& st, std::size_t frames);
/// The peer's process has said something on another way than the link.
void heard_besides(link_state& st);

// -- end (link_end.cpp)

void on_close_link(self_pointer self, close_link order);
void on_leave_link(self_pointer self, leave_link order);
void on_peer_left(self_pointer self, peer_left order);
void on_read_last_frames(self_pointer self, read_last_frames order);
/// Sessions and the port are told why, once; the actor stays until its last session has detached.
void end_link(self_pointer self, troupe::error why);
void finish_if_idle(self_pointer self);

}  // namespace troupe::actors::link_parts
