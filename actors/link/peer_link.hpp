#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <caf/typed_event_based_actor.hpp>

#include "troupe/actors/link/link.hpp"
#include "troupe/actors/link/link_count.hpp"
#include "troupe/actors/link/link_pulse.hpp"
#include "troupe/actors/runtime/inline_executor.hpp"

namespace troupe::actors::links {

/// What the sink of a transport link tells the watch over the peer. Thread-safe.
struct signs_of_life {
  /// That only a living process can have caused: frames, and what else the backend lets count.
  std::atomic<std::uint64_t> signs{0};
  std::atomic<bool> peer_polls{false};  ///< it answers while its engine polls, and not otherwise
};

/// Owns one connection to one incarnation of a peer: makes it (the dialling side also reaches the
/// peer's node actor and falls back from one backend to the next), routes what arrives to the actor
/// of its transfer, and ends it.
///
///   state       event                        next        what happens
///   ----------  ---------------------------  ----------  ------------
///   dialling    peer's reply with an offer   connecting  transport link connects
///   dialling    refusal (the peer's, or our  dialling    again after a pause, `max_reconnects`
///   connecting  own of the GPUs that it                  times; then the next backend, visibly.
///               names), error, time out                  An acceptor that waits is told; one that
///                                                        may be up is asked again
///                                            ending      none left, or a final refusal: link_gone
///   connecting  transport is up              up          link_ready to the port
///   up          transport broke              dialling    the dialling side dials again, the other
///                                                        waits for it; see below
///   up          peer_left                    up          link_leaves to the port; what the peer
///                                                        said last is read, for some 300 ms, then:
///   any         leave_link                   the same    the peer is told; once it has answered,
///                                                        at the latest after `goodbye_patience`:
///   up          close_link, peer has left,   ending      link_is_lost to its sessions, link_gone
///               the peer knows that we leave
///   dialling,   close_link, peer_left, the   ending      the same (link_leaves before it)
///   connecting  peer's end has ended, no
///               attempt is left
///   ending      last session detached        ended       the actor quits
///
/// Words that come with grants wait here, in order, while the link or its device has no room for them.
///
/// Sessions live on after the link is lost until their fences hold; so does the transport link.
///
/// **A link that broke while both processes live is made again** under the same two actors and the
/// same sessions: a fresh transport link, since a broken one is never used again. The dialling side
/// asks the actor of the other end (not the node: a restarted peer is a new peer, and gets a new
/// link), at most `max_reconnects` times with the backend of the link, then with those of
/// `fallback`. A side that sees the break first tells the other by `link_notice`, since an idle
/// transport may never see it. A link that breaks again within `settled` goes on counting.
///
///   - The former transport link is closed and every session fenced on it. It may be the last to
///     become quiescent: `transfer_fenced` waits for all links that a transfer has used.
///   - Each time it comes up, the link begins another *epoch*. Sessions hear `link_is_back`. What
///     they ask for in the name of an epoch that is over is dropped: the decode side asks again with
///     new grants and says what it has, the prefill side waits for that and posts the rest.
///   - The last words on a transfer (`is_last_word`) hold in any epoch. The link keeps a bounded
///     number of them and says them again, also for sessions that have ended; a request whose
///     transfer has ended here is answered by them.
///   - When no attempt is left, both sides fail with `peer_lost`, naming why the link broke and how
///     often it was tried.
///
/// **While something is in flight the peer is watched** (`link_pulse`): sessions are attached, or
/// fences pending. A link that stays silent while the process behind it still answers has broken, as
/// above. A peer that answers neither over the link nor otherwise for `peer_silence` is lost: its
/// sessions are told `peer_lost`, and their fences hold or do not, as with any link that has ended.
/// The same while the link is being made again. An idle link is never broken by silence, nor one
/// whose engine polls, at either end, and computes: there it is enough that the process answers.
class peer_link {
 public:
  using self_pointer = link_actor::stateful_pointer<link_slot>;

  peer_link(self_pointer self, link_options options);
  peer_link(const peer_link&) = delete;
  peer_link& operator=(const peer_link&) = delete;

  /// Begins to dial, on the dialling side.
  [[nodiscard]] link_actor::behavior_type begin();

 private:
  enum class phase : std::uint8_t { dialling, connecting, up, ending };
  struct failed_backend {
    transport::backend_kind kind{};
    std::string why;
  };
  /// A transport link that broke before it was quiescent.
  struct former_link {
    std::uint64_t generation{0};
    std::shared_ptr<transport::link> link;
    std::unordered_set<transfer_id> pending;
  };
  /// The last word on a transfer, as a frame.
  struct last_word {
    transfer_id transfer;
    std::vector<std::byte> frame;
  };
  /// What is to be said with grants, and those that it has already.
  struct words_with_grants {
    say order;
    std::vector<transport::remote_grant> given;
    bool said_why{false};  ///< the log knows what it waits for
  };

  void on_down(const caf::down_msg& down);
  [[nodiscard]] link_report report() const;

  // -- dialling (link_dial.cpp)

  /// Reaches the peer's node; the backends follow.
  void dial();
  void on_dial_again();
  void try_next_backend();
  [[nodiscard]] std::optional<transport::backend_kind> next_kind() const;
  [[nodiscard]] bool was_given_up(transport::backend_kind kind) const;
  [[nodiscard]] std::string failures() const;
  [[nodiscard]] std::string left_out() const;
  [[nodiscard]] std::string reason_for(transport::backend_kind kind) const;
  [[nodiscard]] troupe::error none_joins() const;
  [[nodiscard]] link_request request_of_attempt() const;
  /// Whether the attempt that is under way now is over by the time it is called.
  [[nodiscard]] std::function<bool()> over_with() const;
  void ask_node();
  void ask_other_end();
  /// The peer's end, which was asked, has ended with the attempt before: this one has not begun.
  void ask_node_instead();
  [[nodiscard]] troupe::error no_answer(const caf::error& err) const;
  void got_reply(const link_reply& reply);
  /// An attempt with the chosen backend failed: again, or the next one, or the end.
  void backend_failed(const troupe::error& why);
  [[nodiscard]] std::chrono::milliseconds pause_before_next() const;
  void part_from_other_end(const std::string& why);
  void turn_away(const std::string& why);

  // -- what both sides tell each other before they connect (link_handshake.cpp)

  /// A peer dials: the accepting side's answer.
  [[nodiscard]] link_reply accept(const link_request& request);
  [[nodiscard]] std::optional<link_reply> prepare_again(const link_request& request);
  [[nodiscard]] link_reply refuse(troupe::error why);
  /// The peer's cache must fit ours.
  [[nodiscard]] result<void> adopt_layout(const bytes& encoded);
  /// Those that the peer names for its cache. `out_of_range`: too many, or what is no bus id.
  [[nodiscard]] result<void> adopt_gpus(const std::vector<std::string>& named);
  /// Why this backend cannot serve this pair of nodes, from what the peer has said so far: of its host
  /// when it registered, of its cache when the link is made. Empty if it can.
  [[nodiscard]] std::optional<troupe::error> in_the_way(transport::backend_kind kind) const;
  /// Whether the chosen backend joins this node with the peer, whose cache is on those GPUs. Each side
  /// judges it for itself.
  [[nodiscard]] result<void> judge(const std::vector<std::string>& gpus) const;
  [[nodiscard]] transport::host_identity peer_with(const std::vector<std::string>& gpus) const;

  // -- transport (link_transport.cpp)

  /// Opens a transport link of the chosen kind with a sink that reports to this actor.
  [[nodiscard]] result<void> open_transport();
  [[nodiscard]] link_handle handle() const;
  void on_link_came_up();
  void on_session_message(session_message message);
  void on_completion(transport::completion done);
  /// Also of a former transport link.
  void on_fence_holds(const fence_holds& fence);
  void on_link_broke(link_broke broke);

  // -- sessions (link_sessions.cpp)

  void on_say(say order);
  void on_post_batch(post_batch order);
  void on_fence_now(const fence_now& order);
  void on_attach_session(attach_session order);
  void on_detach_session(const detach_session& order);
  /// What was to be said is not: the link is broken, or its session hears why.
  void failed_to_say(transfer_id transfer, const troupe::error& why);
  /// Tells the session of a transfer, if it is attached.
  void to_session(transfer_id transfer, session_event event);
  /// Batches that the transport has room for by now.
  void post_waiting();
  void give_up_waiting(transfer_id transfer);
  [[nodiscard]] troupe::error not_up() const;
  /// Whether it belongs to a transport link that was replaced.
  [[nodiscard]] bool is_over(std::uint64_t epoch) const;

  // -- grants (link_room.cpp)

  /// Says it when there is room for its grants.
  void say_with_grants(say order);
  /// Room has come, perhaps.
  void serve_room();
  [[nodiscard]] result<void> give_grants(words_with_grants& words);
  void wait_for_room();
  /// Nothing is wanted for the transfer any more.
  void leave_room(transfer_id transfer);
  void on_look_for_room();

  // -- made again (link_rebuild.cpp)

  /// The transport broke while the link was up: it is made again, unless the peer has left.
  void break_link(const troupe::error& why);
  /// Takes the transport away. Sessions are fenced on it, and it stays until those fences hold.
  void retire_transport();
  /// The acceptor waits for the dialling side, and not for ever.
  void wait_for_dialler();
  void on_look_for_dialler(const look_for_dialler& order);
  /// What sessions hear of a link that is up again.
  [[nodiscard]] link_is_back is_back() const;
  /// It is up again: last words first, then the sessions.
  void resume_sessions();
  /// Keeps the frame of a last word.
  void remember(transfer_id transfer, std::vector<std::byte> frame);
  /// Says the last words on a transfer again. False: there are none.
  bool repeat_words(transfer_id transfer);
  /// What is said when no attempt is left.
  [[nodiscard]] troupe::error given_up(const troupe::error& last) const;
  /// The peer's actor of this link, as it is known from its first words: its end is watched.
  void meet(const caf::strong_actor_ptr& other);
  void hear(const link_notice& notice);
  /// The peer's actor of this link has ended, and its process lives: the end of this attempt, or of the
  /// link. `is_gone`: no answer of it comes any more.
  void other_end_ended(std::string why, bool is_gone);
  [[nodiscard]] troupe::error cause_of(const std::string& said) const;
  [[nodiscard]] bool is_dialler() const;
  /// Whether this end dials, and the link has not been up yet.
  [[nodiscard]] bool is_made_for_the_first_time() const;

  // -- whether the peer lives (link_watch.cpp)

  /// The link is up: tells the peer what it must know of this process to judge its silence.
  void introduce() const;
  /// Begins to look if there is reason to and nobody does: after whatever may have given one.
  void watch();
  void on_check_peer_alive();
  void judge_peer();
  void lose_peer();
  void ask_over_link();
  void ask_process();
  /// Takes what has come over the link and nobody has taken yet, at most `frames` of it.
  void read_out(std::size_t frames);
  /// The peer's process has said something on another way than the link.
  void heard_besides();
  [[nodiscard]] bool moved();
  [[nodiscard]] bool is_up() const;
  [[nodiscard]] bool in_flight() const;
  [[nodiscard]] bool worth_watching() const;
  [[nodiscard]] std::string silent_for() const;

  // -- end (link_end.cpp)

  void on_close_link(close_link order);
  void on_leave_link(leave_link order);
  void on_peer_left(peer_left order);
  void on_read_last_frames(read_last_frames order);
  /// Sessions and the port are told why, once; the actor stays until its last session has detached.
  void end_link(troupe::error why);
  void report_gone(troupe::error why);
  void finish_if_idle();

  const self_pointer self_;
  const context_ptr context_;
  const engine_port_actor port_;
  const node_info peer_;
  const transport::link_role role_;
  const std::uint64_t asked_;  ///< `need_link::ask`
  link_count count_;

  phase phase_{phase::dialling};
  std::shared_ptr<transport::link> link_;
  std::uint64_t generation_{0};
  transport::backend_choice choice_;
  bool chose_{false};                   ///< there is a `choice_`
  std::vector<failed_backend> failed_;  ///< those that were given up
  std::uint32_t attempts_{0};           ///< with the present backend
  std::shared_ptr<const kvcache::cache_layout> peer_layout_;
  std::optional<bool> peer_on_gpu_;  ///< whether its cache is; empty: it has not said yet
  node_actor peer_node_;
  std::unordered_map<transfer_id, session_actor> sessions_;
  std::unordered_map<std::uint64_t, transport::batch_id> batches_;  ///< ours -> the session's
  std::deque<post_batch> for_posting_;  ///< for which the transport has no room
  std::uint64_t next_batch_{1};
  std::string why_ended_;
  std::optional<troupe::error> lost_;  ///< what its sessions are told once it has ended

  // -- when it is made again

  link_actor other_end_;         ///< the peer's actor of this link; null until it spoke
  bool may_be_up_there_{false};  ///< the other end went up, perhaps, before this one ever did
  bool unanswered_{false};       ///< what the other end was asked last
  std::optional<troupe::error> broke_;        ///< why it is being made again
  std::optional<troupe::error> peer_leaves_;  ///< it will not be made again when it breaks
  std::optional<troupe::error> leaving_;      ///< why this node stops, while the peer is told so
  std::uint32_t tries_{0};                    ///< to make it again, since it broke
  std::uint32_t rebuilds_{0};
  std::string last_break_;
  time_point up_since_{};
  time_point attempt_began_{};
  std::uint64_t alarm_{0};
  std::vector<former_link> former_;
  /// Fences that were asked for, and the generations whose fence does not hold yet.
  std::unordered_map<transfer_id, std::unordered_set<std::uint64_t>> fencing_;
  std::deque<last_word> words_;  ///< the latest `max_last_words`

  std::deque<words_with_grants> for_room_;
  bool looks_for_room_{false};  ///< the next look is on its way

  // -- whether the peer lives

  link_pulse pulse_;
  /// Of the present transport link.
  std::shared_ptr<signs_of_life> ear_{std::make_shared<signs_of_life>()};
  bool watching_{false};  ///< the next look is on its way
  std::uint64_t signs_seen_{0}, bytes_seen_{0};
  inline_executor reader_;         ///< what a look into the link makes runnable goes through it
  std::uint64_t asked_before_{0};  ///< the first batch behind the last question
};

// -- helpers of more than one of its files

[[nodiscard]] time_point now();
[[nodiscard]] bytes to_bytes(std::span<const std::byte> from);
[[nodiscard]] std::vector<std::byte> from_bytes(const bytes& from);
/// GPUs that a node may name for its cache.
inline constexpr std::size_t max_cache_gpus = 64;
/// Those that hold this node's cache, as a peer is told: what else its process sees does not matter.
[[nodiscard]] std::vector<std::string> cache_gpus(const node_context& context);
/// Whether a failure is one of the whole link, not of what was asked of it.
[[nodiscard]] bool means_broken(const troupe::error& why);

}  // namespace troupe::actors::links
