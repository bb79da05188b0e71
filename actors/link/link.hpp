#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <caf/typed_event_based_actor.hpp>

#include "troupe/actors/context/node_context.hpp"
#include "troupe/actors/link/link_pulse.hpp"
#include "troupe/actors/messages/messages.hpp"
#include "troupe/actors/runtime/inline_executor.hpp"

namespace troupe::actors {

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
struct link_state {
  enum class phase : std::uint8_t { dialling, connecting, up, ending };

  context_ptr context;
  engine_port_actor port;
  node_info peer;
  transport::link_role role{transport::link_role::initiator};
  std::uint64_t asked{0};
  phase now{phase::dialling};
  std::shared_ptr<transport::link> link;
  std::uint64_t generation{0};
  transport::backend_choice choice;
  bool chose{false};  ///< there is a `choice`
  struct failed_backend {
    transport::backend_kind kind{};
    std::string why;
  };
  std::vector<failed_backend> failed;  ///< those that were given up
  std::uint32_t attempts{0};           ///< with the present backend
  std::shared_ptr<const kvcache::cache_layout> peer_layout;
  std::optional<bool> peer_on_gpu;  ///< whether its cache is; empty: it has not said yet
  node_actor peer_node;
  std::unordered_map<transfer_id, session_actor> sessions;
  std::unordered_map<std::uint64_t, transport::batch_id> batches;  ///< ours -> the session's
  std::deque<post_batch> for_posting;  ///< for which the transport has no room
  std::uint64_t next_batch{1};
  std::string why_ended;
  std::optional<troupe::error> lost;  ///< what its sessions are told once it has ended

  // -- when it is made again

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
  link_actor other_end;                ///< the peer's actor of this link; null until it spoke
  bool may_be_up_there{false};         ///< the other end went up, perhaps, before this one ever did
  bool unanswered{false};              ///< what the other end was asked last
  std::optional<troupe::error> broke;  ///< why it is being made again
  std::optional<troupe::error> peer_leaves;  ///< it will not be made again when it breaks
  std::optional<troupe::error> leaving;      ///< why this node stops, while the peer is told so
  std::uint32_t tries{0};                    ///< to make it again, since it broke
  std::uint32_t rebuilds{0};
  std::string last_break;
  time_point up_since{};
  time_point attempt_began{};
  std::uint64_t alarm{0};
  std::vector<former_link> former;
  /// Fences that were asked for, and the generations whose fence does not hold yet.
  std::unordered_map<transfer_id, std::unordered_set<std::uint64_t>> fencing;
  std::deque<last_word> words;  ///< the latest `max_last_words`

  // -- grants

  /// What is to be said with grants, and those that it has already.
  struct words_with_grants {
    say order;
    std::vector<transport::remote_grant> given;
    bool said_why{false};  ///< the log knows what it waits for
  };
  std::deque<words_with_grants> for_room;
  bool looks_for_room{false};  ///< the next look is on its way

  // -- whether the peer lives

  link_pulse pulse;
  std::shared_ptr<signs_of_life> ear{
      std::make_shared<signs_of_life>()};  ///< of the present transport link
  bool watching{false};                    ///< the next look is on its way
  std::uint64_t signs_seen{0}, bytes_seen{0};
  std::unique_ptr<inline_executor>
      reader;                     ///< what a look into the link makes runnable goes through it
  std::uint64_t asked_before{0};  ///< the first batch behind the last question

  static inline const char* name = "link";

  link_state() = default;
  link_state(const link_state&) = delete;
  link_state& operator=(const link_state&) = delete;
  /// A link that crashed has not told the node's counters that it is no more.
  ~link_state();
};

struct link_options {
  context_ptr context;
  engine_port_actor port;
  node_info peer;
  transport::link_role role{transport::link_role::initiator};
  std::uint64_t asked{0};  ///< `need_link::ask`; 0: the peer dialled
};

[[nodiscard]] link_actor::behavior_type link_behavior(link_actor::stateful_pointer<link_state> self,
                                                      link_options options);

}  // namespace troupe::actors
