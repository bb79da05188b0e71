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

#include "troupe/actors/context/node_context.hpp"
#include "troupe/actors/link/link_count.hpp"
#include "troupe/actors/link/link_surroundings.hpp"
#include "troupe/actors/link/peer_liveness.hpp"

namespace troupe::actors::links {

/// Signs of life that the sink of a transport link reports to the watch over the peer. Thread-safe.
struct signs_of_life {
  /// Counts events that only a living peer can cause: frames, and acknowledged batches where the
  /// backend has them.
  std::atomic<std::uint64_t> signs{0};
  std::atomic<bool> peer_polls{false};  ///< the peer answers only while its engine polls
};

/// One connection to one incarnation of a peer, as a plain machine: what happens to it is a call of
/// its methods; what it wants is a call of `link_surroundings` or of its transport link. It makes the
/// connection (the dialling side also reaches the peer's node and falls back from one backend to the
/// next), routes incoming messages to the actor of their transfer, and ends the connection.
///
///   state       event                        next        what happens
///   ----------  ---------------------------  ----------  ------------
///   dialling    peer's reply with an offer   connecting  transport link connects
///   dialling    refusal (the peer's, or our  dialling    again after a pause, `max_reconnects`
///   connecting  own of the GPUs that it                  times; then the next backend, visibly.
///               names), error, time out                  An acceptor that waits is told; one that
///                                                        may be up is asked again
///                                            ending      none left, or a final refusal: link_gone
///   connecting  transport is up              up          link_ready to the runner
///   up          transport broke              dialling    the dialling side dials again, the other
///                                                        waits for it; see below
///   up          peer_left                    up          link_draining to the runner; the peer's last
///                                                        frames are read, for some 300 ms, then:
///   any         leave_link                   the same    the peer is told; once it has answered,
///                                                        at the latest after `goodbye_patience`:
///   up          close_link, peer has left,   ending      link_is_lost to its sessions, link_gone
///               the peer knows that we leave
///   dialling,   close_link, peer_left, the   ending      the same (link_draining before it)
///   connecting  peer's end has ended, no
///               attempt is left
///   ending      last session detached        ended       the actor quits
///
/// Messages with grants wait here, in order, while the link or its device has no room for them.
///
/// Sessions and the transport link outlive the loss of the link until the fences hold.
///
/// **A link that broke while both processes live is rebuilt** under the same two actors and the
/// same sessions, with a new transport link, since a broken one is never used again. The dialling
/// side asks the actor of the other end (not the node: a restarted peer is a new peer, and gets a
/// new link), at most `max_reconnects` times with the backend of the link, then with those of
/// `fallback`. The side that sees the break first tells the other by `link_notice`, since an idle
/// transport may never see it. The attempts of a link that breaks again within 10 s add up.
///
///   - The former transport link is closed and every session fenced on it. It may become quiescent
///     after its successors: `transfer_fenced` waits for all links that a transfer has used.
///   - Each time the link comes up it begins another *epoch*. Sessions hear `link_is_back`. Their
///     orders for an earlier epoch are dropped: the decode side asks again with new grants and says
///     what it has; the prefill side waits for that and posts the rest.
///   - The last words on a transfer (`is_final_message`) hold in any epoch. The link keeps a bounded
///     number of them and repeats them, also for sessions that have ended. They also answer a
///     repeated request whose transfer has ended here.
///   - When no attempt is left, both sides fail with `peer_lost`, naming why the link broke and the
///     number of attempts.
///
/// **The peer is watched while something is in flight** (`peer_liveness`), that is, while sessions are
/// attached or fences pending. A link that stays silent while the process behind it still answers
/// is treated as broken, as above. A peer that answers neither over the link nor otherwise for
/// `peer_silence` is lost: its sessions are told `peer_lost`, and their fences hold or not, as
/// after any link that has ended. The peer is also watched while the link is being rebuilt. Silence
/// never breaks an idle link, nor a link with an engine at either end that polls and is busy
/// computing, as long as the peer's process answers.
class peer_link {
 public:
  struct setup {
    context_ptr context;
    node_info peer;
    transport::link_role role{transport::link_role::initiator};
    std::uint64_t asked{0};  ///< `need_link::ask`; 0: the peer dialled
  };

  /// The surroundings must outlive the link.
  peer_link(link_surroundings& around, setup with);
  peer_link(const peer_link&) = delete;
  peer_link& operator=(const peer_link&) = delete;

  /// Begins to dial, on the dialling side.
  void begin();

  void handle(link_command& command);
  void handle(link_event& event);
  /// The accepting side's answer to a peer that dials.
  [[nodiscard]] link_reply accept(const link_request& request);
  void hear(const link_notice& notice);
  [[nodiscard]] link_report report() const;
  /// Ends `link_surroundings::reach_node`; with an error if the node was not reached.
  void on_node_reached(const std::optional<troupe::error>& failed);
  /// The other end is gone. `crashed`: why; empty if it ended in good order.
  void on_end_down(const std::optional<std::string>& crashed);
  void on_node_down();

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
  /// A message that waits for its grants, and the grants given so far.
  struct words_with_grants {
    say order;
    std::vector<transport::remote_grant> given;
    bool said_why{false};  ///< the wait has been logged
  };

  // -- dialling (link_dial.cpp)

  void on_dial_again();
  void try_next_backend();
  [[nodiscard]] std::optional<transport::backend_kind> next_kind() const;
  [[nodiscard]] bool was_given_up(transport::backend_kind kind) const;
  [[nodiscard]] std::string failures() const;
  [[nodiscard]] std::string left_out() const;
  [[nodiscard]] std::string reason_for(transport::backend_kind kind) const;
  [[nodiscard]] troupe::error none_joins() const;
  [[nodiscard]] link_request request_of_attempt() const;
  /// Returns a function that tells whether the present attempt is over when it is called.
  [[nodiscard]] std::function<bool()> over_with() const;
  void ask_node();
  void ask_other_end();
  /// Asks the peer's node because the end that was asked ended with the previous attempt.
  void ask_node_instead();
  [[nodiscard]] troupe::error unanswered(const no_answer& why) const;
  void got_reply(const link_reply& reply);
  /// Handles a failed attempt: retries, falls back to the next backend, or gives up.
  void backend_failed(const troupe::error& why);
  [[nodiscard]] std::chrono::milliseconds pause_before_next() const;
  void part_from_other_end(const std::string& why);
  void dismiss_acceptor(const std::string& why);

  // -- what both sides tell each other before they connect (link_handshake.cpp)

  [[nodiscard]] std::optional<link_reply> prepare_again(const link_request& request);
  [[nodiscard]] link_reply refuse(troupe::error why);
  /// Takes over the layout of the peer's cache. `layout_mismatch` if it does not fit ours.
  [[nodiscard]] result<void> adopt_layout(const bytes& encoded);
  /// Takes over the GPUs that the peer names for its cache. `out_of_range` if there are too many or
  /// one is not a bus id.
  [[nodiscard]] result<void> adopt_gpus(const std::vector<std::string>& named);
  /// Why this backend cannot serve this pair of nodes, from what the peer has said so far: of its host
  /// when it registered, of its cache when the link is made. Empty if it can.
  [[nodiscard]] std::optional<troupe::error> why_unusable(transport::backend_kind kind) const;
  /// Whether the chosen backend joins this node with the peer, whose cache is on `gpus`. Each side
  /// judges this for itself.
  [[nodiscard]] result<void> judge(const std::vector<std::string>& gpus) const;
  [[nodiscard]] transport::host_identity peer_with(const std::vector<std::string>& gpus) const;

  // -- transport (link_transport.cpp)

  /// Opens a transport link of the chosen kind, which reports to `handle`.
  [[nodiscard]] result<void> open_transport();
  [[nodiscard]] link_handle handle() const;
  void on_link_came_up();
  void on_session_message(session_message message);
  void on_completion(transport::completion done);
  /// The fence may belong to a former transport link.
  void on_fence_holds(const fence_holds& fence);
  void on_link_broke(link_broke broke);

  // -- sessions (link_sessions.cpp)

  void on_say(say order);
  void on_post_batch(post_batch order);
  void on_fence_now(const fence_now& order);
  void on_attach_session(attach_session order);
  void on_detach_session(const detach_session& order);
  /// Handles a message that could not be sent: breaks the link, or tells the session why.
  void failed_to_say(transfer_id transfer, const troupe::error& why);
  /// Passes the event to the session of the transfer, if one is attached.
  void to_session(transfer_id transfer, session_event event);
  /// Posts waiting batches as far as the transport has room.
  void post_waiting();
  void give_up_waiting(transfer_id transfer);
  [[nodiscard]] troupe::error not_up() const;
  /// Whether the epoch belongs to a transport link that was replaced. Epoch 0 is never over.
  [[nodiscard]] bool is_over(std::uint64_t epoch) const;

  // -- grants (link_room.cpp)

  /// Sends the message once there is room for its grants.
  void say_with_grants(say order);
  /// Sends the waiting messages as far as there is room for their grants.
  void serve_room();
  [[nodiscard]] result<void> give_grants(words_with_grants& words);
  void wait_for_room();
  /// Drops the waiting messages of the transfer.
  void leave_room(transfer_id transfer);
  void on_look_for_room();

  // -- rebuilding (link_rebuild.cpp)

  /// Handles a transport that broke while the link was up: rebuilds it, unless the peer or this
  /// node is leaving.
  void break_link(const troupe::error& why);
  /// Drops the transport link. It is destroyed once the fences of all its sessions hold.
  void drop_transport();
  /// The acceptor waits for the dialling side for a bounded time.
  void wait_for_dialler();
  void on_look_for_dialler(const look_for_dialler& order);
  /// The notice to sessions of a link that is up again.
  [[nodiscard]] link_is_back is_back() const;
  /// After a rebuild, repeats the last words, then tells the sessions.
  void resume_sessions();
  /// Keeps the frame of a last word.
  void remember(transfer_id transfer, std::vector<std::byte> frame);
  /// Repeats the last words on a transfer. Returns whether there are any.
  bool resend_final_messages(transfer_id transfer);
  /// The error when no attempt is left.
  [[nodiscard]] troupe::error given_up(const troupe::error& last) const;
  /// Adopts the peer's end of this link, known from its first message, and monitors it.
  void meet(far_end other);
  /// Handles the end of the peer's actor of this link while its process lives: ends this attempt,
  /// or the link. `is_gone`: the actor will not answer any more.
  void other_end_ended(std::string why, bool is_gone);
  [[nodiscard]] troupe::error cause_of(const std::string& said) const;
  [[nodiscard]] bool is_dialler() const;
  /// Whether this end dials, and the link has not been up yet.
  [[nodiscard]] bool is_made_for_the_first_time() const;

  // -- whether the peer lives (link_watch.cpp)

  /// Tells the peer, once the link is up, what it must know of this process to judge its silence.
  void introduce() const;
  /// Begins to watch the peer if that is needed and not under way. Called after every event that
  /// may have made it necessary.
  void watch();
  void on_check_peer_alive();
  void judge_peer();
  void lose_peer();
  void ask_over_link();
  void ask_process();
  /// Notes a sign of life of the peer's process that came by another way than the link.
  void on_process_answered();
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
  /// Tells the sessions and the runner why, once. The actor stays until the last session detaches.
  void end_link(troupe::error why);
  void report_gone(troupe::error why);
  void finish_if_idle();

  link_surroundings& around_;
  const context_ptr context_;
  const node_info peer_;
  const transport::link_role role_;
  const std::uint64_t asked_;  ///< `need_link::ask`
  link_count count_;

  phase phase_{phase::dialling};
  std::shared_ptr<transport::link> link_;
  std::uint64_t generation_{0};
  transport::backend_choice choice_;
  bool chose_{false};                   ///< `choice_` is set
  std::vector<failed_backend> failed_;  ///< backends that were given up
  std::uint32_t attempts_{0};           ///< with the present backend
  std::shared_ptr<const kvcache::cache_layout> peer_layout_;
  std::optional<bool> peer_on_gpu_;  ///< whether the peer's cache is on GPUs; empty: not told yet
  bool reached_node_{false};
  std::unordered_map<transfer_id, session_actor> sessions_;
  std::unordered_map<std::uint64_t, transport::batch_id> batches_;  ///< ours -> the session's
  std::deque<post_batch> for_posting_;  ///< batches that the transport has no room for
  std::uint64_t next_batch_{1};
  std::string why_ended_;
  std::optional<troupe::error> lost_;  ///< what sessions are told once the link has ended

  // -- rebuilding

  far_end other_end_;                   ///< the peer's end of this link; none until it spoke
  bool may_be_up_there_{false};         ///< the other end may have come up before this one ever did
  bool unanswered_{false};              ///< the last request to the other end timed out
  std::optional<troupe::error> broke_;  ///< why the link is being rebuilt
  std::optional<troupe::error> peer_leaves_;  ///< set once the peer left: a break is then final
  std::optional<troupe::error> leaving_;      ///< why this node stops, while the peer is told so
  std::uint32_t tries_{0};                    ///< attempts to rebuild the link since it broke
  std::uint32_t rebuilds_{0};
  std::string last_break_;
  time_point up_since_{};
  time_point attempt_began_{};
  std::uint64_t alarm_{0};
  std::vector<former_link> former_;
  /// Requested fences, each with the generations whose fence does not hold yet.
  std::unordered_map<transfer_id, std::unordered_set<std::uint64_t>> fencing_;
  std::deque<last_word> words_;  ///< the latest `max_last_words`

  std::deque<words_with_grants> for_room_;
  bool looks_for_room_{false};  ///< the next look is scheduled

  // -- whether the peer lives

  peer_liveness pulse_;
  /// Signs of life over the present transport link.
  std::shared_ptr<signs_of_life> ear_{std::make_shared<signs_of_life>()};
  bool watching_{false};  ///< the next look is scheduled
  std::uint64_t signs_seen_{0}, bytes_seen_{0};
  std::uint64_t asked_before_{0};  ///< the first batch posted after the last question
};

// -- helpers shared by several of these files

[[nodiscard]] bytes to_bytes(std::span<const std::byte> from);
[[nodiscard]] std::vector<std::byte> from_bytes(const bytes& from);
/// The most GPUs that a node may name for its cache.
inline constexpr std::size_t max_cache_gpus = 64;
/// The GPUs that hold this node's cache, as told to a peer; not all GPUs that the process sees.
[[nodiscard]] std::vector<std::string> cache_gpus(const node_context& context);
/// Whether a failure is that of the whole link, not of one order.
[[nodiscard]] bool means_broken(const troupe::error& why);

}  // namespace troupe::actors::links
