#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <variant>
#include <vector>

#include "troupe/actors/context/node_context.hpp"
#include "troupe/actors/messages/messages.hpp"
#include "troupe/actors/operations/cache_leases.hpp"
#include "troupe/actors/operations/compute_line.hpp"
#include "troupe/actors/operations/source.hpp"
#include "troupe/actors/runner/runner_surroundings.hpp"
#include "troupe/kvcache/plan.hpp"

namespace troupe::actors::operations {

/// Deadline of a session that only its peer's liveness bounds.
constexpr auto no_deadline = time_point::max();
/// Longer times are cut to this: the clock's own unit would overflow.
constexpr std::chrono::milliseconds longest_time = std::chrono::hours{24 * 365};

/// A `receive` of the engine: one transfer from each rank of the prefill replica, one outcome.
struct receive_operation {
  enum class phase : std::uint8_t { in_line, linking, moving, concluded };
  struct from_rank {
    std::string peer;
    std::optional<transfer_id> transfer;  ///< once it has a receiver
    bool done{false};
    /// Per layer of this node, the first token that has not landed yet; the end of the tokens for a
    /// layer that this source does not hold.
    std::vector<std::uint32_t> landed;
  };

  receive_spec spec;
  phase state{phase::linking};
  std::vector<from_rank> ranks;
  std::vector<std::uint32_t> reported;    ///< per layer, up to which token the engine was told
  std::vector<open_when_complete> gates;  ///< streams that wait for layers
  std::uint32_t live{0};                  ///< receivers that have not unpinned
  bool pinned{false};
  time_point began{};
  time_point deadline;
  std::uint64_t bytes{0};
  seen_movement moved;
  std::vector<std::byte> aux;
};

/// A decode rank's request that arrived before its source.
struct parked_request {
  link_handle link;
  transfer_request request;
  time_point deadline;
  time_point until;  ///< when it stops waiting: the deadline, or earlier if the request says so
};

/// A `release` or a `hold` of the engine: one message to each source of a request, one outcome.
struct words_to_sources {
  struct to_source {
    std::string peer;
    std::uint64_t life{0};                ///< the incarnation that is meant; 0: any
    std::optional<transfer_id> transfer;  ///< once it has a session
    bool ended{false};
  };
  source_verb verb{source_verb::release};
  std::string request;
  std::vector<to_source> sources;
  time_point deadline;
  std::optional<troupe::error> failure;  ///< of a release: the first one
};

/// A decode node holds one of our sources, and will ask for it.
struct source_hold {
  operation_id source;
  link_handle link;
  time_point since;
};

/// A session that works for an operation, kept until its last message.
struct live_session {
  operation_id operation;  ///< 0: none, it serves a peer's request for a keyed value of ours
  session_actor actor;
  link_handle link;
  transfer_report report;
  time_point deadline;
  bool served{false};   ///< serves a peer's request, and counts in `served_count_`
  bool crashed{false};  ///< this actor or its link's crashed
  time_point started{};
  std::shared_ptr<const void> touched{};  ///< `session::touched`
  bool replaced{false};                   ///< by a `session_fence`
  bool lends{false};                      ///< a put whose bytes the peer may read where they are
  std::optional<troupe::error> owed{};    ///< of a put: its outcome, to be told behind the fence
};

/// The operations that wait for the link with one peer. Kept until the node has answered, even when
/// none waits any more, so that the node is asked once.
struct link_line {
  std::set<operation_id> waiting;
  std::uint64_t ask{0};  ///< number of the request to the node
};

/// The mapping between our cache and a peer's.
struct known_geometry {
  std::shared_ptr<const kvcache::cache_layout> of;  ///< the peer's
  std::shared_ptr<const kvcache::transfer_geometry> maps;
};

/// An operation on a keyed value of another node, before it has a link.
struct waiting_value {
  start_value order;
  time_point deadline;
};

/// Runs every operation of the engine (sends, receives, releases, holds, keyed values), each with
/// one outcome. Begins the sessions that work for them, and ends those that do not end in time.
class operation_runner {
 public:
  /// The surroundings outlive the runner.
  operation_runner(runner_surroundings& around, context_ptr context);
  operation_runner(const operation_runner&) = delete;
  operation_runner& operator=(const operation_runner&) = delete;

  void handle(engine_command& command);
  void handle(runner_event& event);
  void handle(node_notice& notice);
  /// The pause that the runner asked for is over.
  void tick();
  /// The actor of a link that is watched has ended.
  void on_link_ended(std::uint64_t link, bool crashed);
  /// `why`: how the crash shows in the log.
  void on_session_crashed(transfer_id transfer, const std::string& why);
  [[nodiscard]] transfer_reports report() const;

 private:
  /// What kind of entry a deadline ends.
  enum class timer : std::uint8_t { operation, session, parked, leases };
  using deadline_entry = std::tuple<time_point, timer, std::uint64_t>;
  using parked_requests = std::unordered_map<std::string, std::vector<parked_request>>;

  void arm();
  void on_session_concluded(session_concluded& outcome);
  void on_session_unpinned(session_unpinned& last);
  void on_link_ready(link_ready& ready);
  void forget_link(const std::string& peer, std::uint64_t actor);
  void on_link_draining(link_draining& leaves);
  void on_link_gone(link_gone& gone);
  void on_unrouted_message(unrouted_message& came);
  void end_operation(operation_id operation, troupe::error why, const session_event& to_sessions);
  void on_abort_operation(abort_operation& order);
  void on_stop_runner();
  void parked_too_long(transfer_id transfer);
  void deadline_passed(timer what, std::uint64_t id);
  void count_as_crashed(live_session& session);
  void fail_crashed(live_session& session, transfer_id transfer);

  // -- shared (runner_sessions.cpp)

  [[nodiscard]] time_point deadline_after(std::chrono::milliseconds wanted) const;
  void forget_deadline(time_point when, timer what, std::uint64_t id);
  [[nodiscard]] transfer_id new_transfer();
  /// `overloaded` if no more requests of peers may be served.
  [[nodiscard]] result<void> room_to_serve() const;
  /// The mapping between our cache and the peer's, made once per peer.
  [[nodiscard]] result<std::shared_ptr<const kvcache::transfer_geometry>> geometry(
      const link_handle& link, kvcache::data_flow flow);
  /// Adds a session: from here on it is told of its deadline, and of the end of its link.
  void session_begins(operation_id operation, transfer_id transfer, session_actor actor,
                      const link_handle& link, transfer_report report, time_point deadline,
                      std::shared_ptr<const void> touched = {});
  void session_ends(transfer_id transfer);
  /// Counts live sessions for the heartbeats. Crashed ones do not count: their operations have failed,
  /// and they may keep their pins for ever.
  void count_sessions();
  void tell_session(transfer_id transfer, session_event event);
  /// Passes on a message whose session its link does not know: it came right behind the message
  /// that the session was begun for, or over a link that has been rebuilt since.
  void pass_on(transfer_id transfer, const link_handle& link, session_message message);
  void say_over(const link_handle& link, session_message message);
  void refuse_request(const link_handle& link, transfer_id transfer, const troupe::error& why);
  /// Same, if the source does not have what is asked for: no send fails because of it.
  void refuse_alone(const link_handle& link, transfer_id transfer, const troupe::error& why);
  /// Tells the last outcome of an operation, with no event after it. Returns false if it was told
  /// before.
  bool tell_last_outcome(operation_id operation, decltype(value_concluded::outcome) outcome);
  /// Tells the one outcome of an operation. Returns false if it was told before.
  bool tell_outcome(operation_id operation, std::variant<event_done, event_failed> outcome);
  void count_outcome(const std::optional<troupe::error>& failure, std::uint64_t bytes);
  /// Queues an operation for a link: it goes on with `link_ready`, or ends with `link_gone`.
  void wait_for_link(const std::string& peer, operation_id operation);
  void leave_link_line(const std::string& peer, operation_id operation);
  /// Unpins blocks that the operation pinned; that cannot fail while the bookkeeping is right.
  void unpin_blocks(const std::string& request, std::span<const block_id> blocks);

  // -- sources, prefill side (runner_sources.cpp)

  void on_start_send(start_send& order);
  void on_send_grew(send_grew& order);
  void on_send_progress(send_progress& order);
  void on_send_sealed(send_sealed& order);
  void on_gpu_point_reached(gpu_point_reached& news);
  /// A decode rank asks: its request meets its source, or is parked until the source comes.
  void request_came(const link_handle& link, transfer_request request);
  /// Takes the parked requests for which `gone` holds out of the parking lot.
  void drop_parked(const std::function<bool(const parked_request&)>& gone);
  /// Same, only among those for one request, or those of one transfer.
  void drop_parked_for(const std::string& request,
                       const std::function<bool(const parked_request&)>& gone);
  void drop_parked_of(transfer_id transfer, const std::function<bool(const parked_request&)>& gone);
  /// The replica and stage that a node is a rank of; empty while the membership does not list it.
  [[nodiscard]] std::string replica_of(const std::string& node) const;
  /// If no place of the source is open any more, restores the deadline that the engine gave.
  void lengthen_if_filled(operation_id operation, source& src);
  /// The membership changed: ranks whose replica was unknown may have one now, which may complete a
  /// source.
  void place_ranks();
  void conclude_source(operation_id operation, std::optional<troupe::error> failure,
                       const session_event& to_senders);
  void sender_concluded(operation_id operation, session_concluded& outcome);
  /// A decode rank that takes the source failed: this ends the source or leaves a place open.
  void rank_failed(operation_id operation, transfer_id transfer, troupe::error why);
  /// A node that the source is for is gone. With a `retry_window`, its place waits that long for
  /// another.
  void place_lost(operation_id operation, source& src, troupe::error why);
  /// A node that filled a place, or waited for it, took it back. With a `retry_window`, the loss that
  /// opened the place before counts again.
  void place_reopened(operation_id operation, source& src);
  /// Drops a concluded source once its last sender has unpinned.
  void release_source(operation_id operation);
  void learn_replicas(source& src) const;
  void start_sender(operation_id operation, const link_handle& link, transfer_request request,
                    time_point deadline);
  void no_longer_parked(const parked_request& one);
  bool answer(const link_handle& link, transfer_request& request, time_point deadline);
  void unpark(const std::string& request);
  void grow(source& src, const source_progress& more);
  void complete(operation_id operation, source& src, source_sealed& seal);
  void go_on(operation_id operation, source& src);
  std::optional<troupe::error> void_placement(const link_handle& link,
                                              const transfer_request& request) const;
  result<void> room_to_park(const link_handle& link, const transfer_request& request) const;
  parked_requests::iterator drop_parked_at(parked_requests::iterator of,
                                           const std::function<bool(const parked_request&)>& gone);

  // -- receives, decode side (runner_receives.cpp)

  void on_start_receive(start_receive& order);
  void on_open_when_complete(open_when_complete& order);
  void on_blocks_granted(blocks_granted& granted);
  void on_session_layers(session_layers& layers);
  /// Starts the receivers of a receive whose blocks are allocated: one for each source whose link
  /// is up; asks for the links of the others. Sources that hold parts of a model start together,
  /// once it is known that each layer is held by one.
  void start_receivers(operation_id operation);
  void conclude_receive(operation_id operation, std::optional<troupe::error> failure,
                        const session_event& to_receivers);
  void fail_receive(operation_id operation, troupe::error why);
  void receiver_concluded(operation_id operation, session_concluded& outcome);
  /// Drops a concluded receive once its last receiver has unpinned.
  void release_receive(operation_id operation);
  void tell_layers_of(operation_id operation, receive_operation& r);
  void start_receiver(operation_id operation, std::size_t index, const link_handle& link);
  result<bool> may_start(const receive_operation& r);
  std::optional<troupe::error> void_placement(const receive_spec& spec) const;
  void begin_moving(operation_id operation);

  // -- words to sources without a receive, both sides (runner_words.cpp)

  void on_start_word(start_word& order);
  void start_word_to(operation_id operation, const link_handle& link);
  /// No link with that source can be made.
  void word_cannot_come(operation_id operation, const std::string& peer, const troupe::error& why);
  void word_concluded(operation_id operation, session_concluded& outcome);
  void conclude_words(operation_id operation, std::optional<troupe::error> failure,
                      const session_event& to_sessions);
  /// Every source of the request was asked for it: our hold on them is no longer needed.
  void end_own_hold(const std::string& request);
  /// A decode node holds a source, or gives it back.
  void hold_came(const link_handle& link, const transfer_hold& word);
  void forget_came(const link_handle& link, const transfer_forget& word);
  /// Tells the nodes that hold the source how it ended; empty `failure`: it was delivered.
  void tell_holders(source& src, const std::optional<troupe::error>& failure);
  void end_hold(transfer_id transfer);
  /// Ends the holds that came over a link that has ended.
  void end_holds_over(std::uint64_t link);
  void has_ended(operation_id operation, words_to_sources::to_source& at,
                 std::optional<troupe::error> failure);
  words_to_sources::to_source* waiting_source(operation_id operation, const std::string& peer);
  void say_word(operation_id operation, words_to_sources::to_source& to, const link_handle& link);
  result<void> check_word(const link_handle& link, std::uint64_t life) const;
  std::optional<std::string> other_taker(const source& src, const std::string& peer) const;
  std::optional<std::string> other_asker(const std::string& request, const std::string& peer) const;

  // -- leases (runner_leases.cpp)

  void on_membership_changed(membership_changed& news);
  void on_heartbeat_answered(heartbeat_answered& news);
  /// Ends what is held for, or from, nodes that are no longer alive.
  void lapsed(const std::vector<cache_leases::lapse>& lapses);
  /// Starts the lease beat if anything is held.
  void watch_leases();
  void lease_beat();
  void reclaim(operation_id operation, source& src, const cache_leases::lapse& over);
  void source_lapses(operation_id operation, source& src, const cache_leases::lapse& over);

  // -- keyed values (runner_values.cpp)

  void on_start_value(start_value& order);
  void on_value_concluded(value_concluded& outcome);
  void start_client(waiting_value value, const link_handle& link);
  /// Fails a value's operation that has no client, or whose client is not waited for.
  void fail_value(operation_id operation, troupe::error why);
  /// Fails a value's operation whose link's actor crashed: how it ended is unknown, and whether the
  /// peer still reads what is put.
  void lose_value(operation_id operation, troupe::error why);
  /// Unpins the blocks that the operation puts: nobody can read them any more.
  void unpin_value(operation_id operation);
  /// Takes a value's operation out of the queue for its link. Empty if it is in none.
  [[nodiscard]] std::optional<waiting_value> no_longer_waits(operation_id operation);
  /// A peer asks for one of our values.
  void value_came(const link_handle& link, session_message& message);
  void value_outcome(value_concluded& outcome);
  void count_copies();
  void copy_here(start_value& order);

  runner_surroundings& around_;
  const context_ptr context_;
  std::map<operation_id, source> sources_;
  std::unordered_map<operation_id, compute_line> compute_;   ///< of sources: what waits for the GPU
  std::unordered_map<std::string, operation_id> source_of_;  ///< by request, not concluded
  ended_requests ended_;
  ended_requests given_back_;  ///< requests given back before they were sent
  std::map<operation_id, receive_operation> receives_;
  std::unordered_map<transfer_id, live_session> sessions_;  ///< both sides, and values
  std::size_t crashed_sessions_{0};                         ///< of `sessions_`; not waited for
  std::unordered_map<std::string, link_handle> links_;      ///< by peer name, up
  /// The links whose end is told to their sessions; true if the peer has left.
  std::unordered_map<std::uint64_t, bool> watched_links_;
  std::unordered_map<std::string, link_line> waiting_for_link_;  ///< by peer name
  std::unordered_map<std::string, std::uint64_t> former_lives_;  ///< by peer name: last one ended
  parked_requests parked_;                                       ///< by request
  std::uint64_t asks_{0};                                        ///< requests for links so far
  std::unordered_multimap<transfer_id, std::string> parked_as_;  ///< requests, by transfer
  std::uint32_t parked_count_{0};
  std::map<std::string, std::uint32_t> parked_of_;  ///< by peer name
  std::size_t parked_bytes_{0};                     ///< of the lists of parked requests
  std::uint32_t served_count_{0};                   ///< of `sessions_`: those that serve peers
  std::set<deadline_entry> deadlines_;
  cache_leases leases_;                   ///< of sources and receives that are not concluded
  std::optional<time_point> lease_beat_;  ///< empty: nothing is held
  std::unordered_map<incarnation, known_geometry> send_geometry_, receive_geometry_;
  std::map<operation_id, words_to_sources> words_;         ///< not concluded
  std::unordered_map<std::string, operation_id> hold_of_;  ///< holds among `words_`, by request
  std::unordered_map<transfer_id, source_hold> holds_;     ///< of peers
  std::map<operation_id, waiting_value> values_;           ///< that wait for a link
  std::unordered_map<operation_id, transfer_id> value_clients_;
  std::unordered_set<operation_id> copying_;  ///< large puts to this node itself
  /// Pool blocks that values are put from, pinned until nobody can read them.
  std::unordered_map<operation_id, std::vector<block_id>> value_pins_;
  std::shared_ptr<const membership> members_{std::make_shared<membership>()};  ///< newest seen
  bool ticking_{false};
  bool stopping_{false};
};

// -- helpers of more than one of its files

/// The row of `troupe status` for a session; `session_begins` fills in its transfer.
[[nodiscard]] transfer_report report_of(const std::string& request, const link_handle& link,
                                        std::string_view side, std::string_view state);
/// The error for a request that no longer waits for its source.
[[nodiscard]] troupe::error not_offered(const std::string& request);

}  // namespace troupe::actors::operations
