#pragma once

/// Who is in the cluster and how well: the supervisor's table. A plain class without threads, I/O
/// or a clock; time comes in with every call. The `supervisor` actor feeds it and carries out what
/// it says.
///
/// One entry per name of the deployment. A name holds at most one incarnation at a time; every
/// other incarnation under that name is told to register again or is refused.
///
/// Nodes that no file names join open stages. Each gets an entry when it registers first, and loses it
/// when it has been down for `forget_after`, when it is the longest down in a stage that is full, or when
/// its replica comes back in another shape. Who lost its entry in a life is refused in that life for good.
///
///   state    registered   heartbeat  3 missed  timed out  lost (3)  leave     drain    cancel
///   -------  -----------  ---------  --------  ---------  --------  --------  -------  -------
///   absent   joining      unknown    -         -          -         -         refused  refused
///   joining  (1)          up         joining   down       down      leaving   leaving  refused
///   up       (1)          up         suspect   down       down      leaving   leaving  refused
///   suspect  (1)          up         suspect   down       down      leaving   leaving  refused
///   leaving  joining (2)  leaving    leaving   down       down      leaving   (4)      up (5)
///   down     joining (2)  unknown    down      down       down      down (6)  refused  refused
///
/// "3 missed" and "timed out" are silence: of 3 heartbeats, of the heartbeat timeout.
///
/// (1) The same incarnation again (its reply was lost): the state stays. Another incarnation:
/// `joining` when the old one is provably or probably gone, that is when it is silent for as long
/// as a suspect is or when the new one has bound the very host and port of the old;
/// `already_exists` else.
///
/// (2) The same incarnation again, of a node that is or was drained: `leaving`. A connection that
/// broke cancels no drain; only another incarnation starts afresh.
///
/// (3) The connection.
///
/// (4) Refused where it drains already. Who leaves by its own word, and has not gone, is drained
/// from then on.
///
/// (5) `suspect` where it is silent for as long as one. Refused where nobody drains it, once it leaves by
/// its own word, and once it was told to leave.
///
/// (6) `leaving` where it is down by its own report: it lives, and stops in good order now.
///
/// A node that reports a failure of its own (`heartbeat.failure`) is `down` from then on, whatever its
/// heartbeats say; they are still answered `known`, and its silence is judged. It comes back as
/// every down node does: by registering. What leaves is not touched by a report.
///
/// A table that is restored from a record knows the lives of the supervisor before it: those that
/// were there are `joining`, without having registered here. Their heartbeats are `unknown`, they get
/// the whole heartbeat timeout to register, and they give way to any other life of their name.
///
/// Every table collects for a heartbeat timeout, which its lists say: nodes that a supervisor before it took
/// in may register yet, also those that no record names. From then on who is not in its list is no member.
///
/// A `joining` node has registered and said nothing since; its first heartbeat makes it `up`. It
/// gets the whole heartbeat timeout for that. An incarnation that another one replaced is refused
/// as `stale_incarnation` from then on, whatever becomes of its successor.

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "troupe/actors/cluster_messages.hpp"
#include "troupe/actors/membership/membership_record.hpp"
#include "troupe/kvcache/result.hpp"

namespace troupe::actors {

/// Monotonic; nothing here may look at the wall clock.
using steady_time = std::chrono::steady_clock::time_point;

/// A node that the deployment names, and the place that it gets.
struct expected_slot {
  std::string name;
  std::string stage;
  node_role role{node_role::prefill};
  std::uint32_t replica{0};
  std::uint32_t rank{0};
  std::uint32_t ranks{1};
  std::string host{};  ///< as the deployment says; `auto`: any
};

/// A stage whose nodes no file names.
struct open_stage {
  std::string name;
  node_role role{node_role::both};
  std::uint32_t max_nodes{256};
};

/// Whether a node may say this of itself to join that stage: role, replica, rank, name, labels.
/// `invalid_config` naming what is wrong.
[[nodiscard]] result<void> check_announcement(const node_info& node, const open_stage& stage);

/// How the name of a slot is used.
struct slot_use {
  enum class kind : std::uint8_t {
    unused,   ///< nobody was ever known under it
    used,     ///< by a life that is there
    awaited,  ///< whoever the supervisor before this one took in under it may still come back
    down,     ///< its last life is, and some node that is there does not know it yet
    fenced,   ///< its last life is down, and every node that is there knows it
  };
  kind how{kind::unused};
  std::uint64_t incarnation{0};  ///< of the last life
  std::uint64_t down_epoch{0};   ///< when that went down, if it has
};

struct membership_options {
  std::string cluster;
  std::uint64_t supervisor_incarnation{0};
  std::vector<expected_slot> slots;
  std::vector<open_stage> open{};
  std::chrono::milliseconds forget_after{std::chrono::minutes{10}};  ///< of a node of an open stage
  std::chrono::milliseconds heartbeat_interval{1000};
  std::chrono::milliseconds heartbeat_timeout{5000};
  std::uint32_t suspect_after_missed{3};              ///< heartbeats
  std::chrono::milliseconds broadcast_interval{100};  ///< at most one broadcast in this time
  /// A longer gap between two ticks means that the supervisor itself stood still. Nodes are not
  /// blamed for it.
  std::chrono::milliseconds stall_tolerance{1000};
};

struct node_life {
  std::string name;
  std::uint64_t incarnation{0};
  friend bool operator==(const node_life&, const node_life&) = default;
};

/// What happened to one node, for the log.
struct node_transition {
  std::string name;
  std::uint64_t incarnation{0};
  std::optional<node_state> from;  ///< none: it was absent
  node_state to{node_state::joining};
  std::uint64_t epoch{0};  ///< that this change made
  std::string reason;
  bool forgotten{false};  ///< it has no entry any more; `to` is `down`
};

enum class heartbeat_verdict : std::uint8_t {
  known,    ///< recorded
  unknown,  ///< nobody of that name and incarnation is registered, or it was declared down:
            ///< register again
  stale,    ///< another incarnation replaced this one: it cannot come back
};

class membership_table {
 public:
  explicit membership_table(membership_options options);

  // -- events

  /// A node wants in. The reply carries the replica that it serves. Errors: `version_mismatch`,
  /// `invalid_config` (another cluster, or not what the deployment says of that name), `not_found`
  /// (a name that the deployment does not have), `already_exists`, `stale_incarnation`. Of one that joins
  /// an open stage also: `layout_mismatch` (not what the other ranks of its replica say), `overloaded`
  /// (the stage is full).
  [[nodiscard]] result<registration> registered(const registration_request& request,
                                                steady_time now);
  /// A node says that it lives, and how busy it is. Never makes its remaining time shorter. A load
  /// that was overtaken by a newer one (by sequence) is not recorded.
  [[nodiscard]] heartbeat_verdict heard(const heartbeat& beat, steady_time now);
  /// A node stops in good order. Ignored (false) unless that incarnation is there and not down; one
  /// that is down by its own report is there, and goes to `leaving` too.
  bool leave(std::string_view name, std::uint64_t incarnation, steady_time now);
  /// An operator drains a node. The incarnation that drains from now on. Errors, all of which say
  /// what to do: `not_found` (no such node, or none that ever registered), `invalid_config` (the
  /// supervisor itself), `peer_lost` (it is down), `already_exists` (it drains already).
  [[nodiscard]] result<std::uint64_t> drain(std::string_view name);
  /// An operator wants it to serve on, and with it all ranks of its replica: those that do. Errors,
  /// all of which say what to do: `not_found` (no such node, or nobody drains it), `peer_lost` (too
  /// late: it is down, leaves by its own word, or was told to leave).
  [[nodiscard]] result<std::vector<node_life>> cancel_drain(std::string_view name, steady_time now);
  /// What is to be seen of a node while it drains. No change of its state, and no epoch.
  void draining(std::string_view name, std::uint64_t incarnation, std::string reason);
  /// It was told to leave: why it is down, once its connection ends. Seen from now on, too.
  void drained(std::string_view name, std::uint64_t incarnation, std::string reason);
  /// The connection to a node broke or its process ended. Ignored (false) unless that incarnation
  /// is there.
  bool connection_lost(std::string_view name, std::uint64_t incarnation, std::string_view reason,
                       steady_time now);
  /// Before anything else: what a supervisor before this one left. Its epochs are not used again;
  /// nodes that the deployment no longer has are left out.
  void restore(const membership_record& left, steady_time now);
  /// Judges silence. To be called several times per heartbeat interval.
  void tick(steady_time now);
  /// Everything that judges a node by the clock begins with it: a long time without a tick is one in
  /// which this process stood still, and what the nodes sent meanwhile still waits to be read. It is
  /// held against nobody. How long it was; 0: it went on.
  std::chrono::steady_clock::duration stood_still(steady_time now);

  // -- what follows from them

  /// Changes since the last call, oldest first.
  [[nodiscard]] std::vector<node_transition> take_transitions();
  /// The full list, when its epoch was not broadcast yet and the last broadcast is
  /// `broadcast_interval` ago; in clusters of hundreds of nodes longer, since each is told of each:
  /// 3 s after a list of 1,000. What nodes say of their load is news too, but not so urgent: it goes
  /// once per heartbeat interval (there less often), under the same epoch. So does the news that the
  /// table collects no more.
  [[nodiscard]] std::optional<membership> take_broadcast(steady_time now);

  // -- properties

  /// Every node that registered since the supervisor started, in the deployment's order; behind them
  /// those that joined.
  [[nodiscard]] membership view() const;
  [[nodiscard]] std::uint64_t epoch() const noexcept { return epoch_; }
  /// What must survive the supervisor, with `epoch_reserve` epochs that it may use unrecorded.
  [[nodiscard]] membership_record record() const;
  /// How many nodes live: those that are not `down`, and those that are by their own report.
  [[nodiscard]] std::size_t nodes_there() const;
  /// Whether that node is `down` by its own report: it lives, and its connection stands.
  [[nodiscard]] bool reports_failure(std::string_view name) const;
  /// Empty when that name never registered.
  [[nodiscard]] std::optional<node_state> state_of(std::string_view name) const;
  [[nodiscard]] std::optional<std::uint64_t> incarnation_of(std::string_view name) const;
  /// The ranks of a node's replica, itself among them. Empty: no such node.
  [[nodiscard]] std::vector<expected_slot> replica_of(std::string_view name) const;
  /// What claims of its nodes have to know (`slot_claims.hpp`), in the order of `options().slots`.
  [[nodiscard]] std::vector<slot_use> uses(steady_time now) const;
  [[nodiscard]] heartbeat_ack ack(heartbeat_verdict verdict) const noexcept;
  [[nodiscard]] const membership_options& options() const noexcept { return options_; }

 private:
  struct entry {
    expected_slot slot;
    std::optional<node_state> state;
    node_info info;
    load_report load;
    std::string reason;                       ///< of the last change
    bool joined{false};                       ///< no file names it
    std::optional<steady_time> down_since{};  ///< of one that joined, as `tick` saw it first
    bool reported{false};                     ///< `down` by its own report
    bool remembered{false};                   ///< of a record, and has not registered here
    std::uint64_t sequence{0};
    std::uint64_t registered{0};  ///< `member::registered`
    std::uint64_t adopted{0};     ///< epoch of the newest membership that this life has
    std::uint64_t down_epoch{0};  ///< when it went down, while it is
    steady_time heard{};
    bool drains{false};    ///< or did, before it was down
    std::string farewell;  ///< why it will have been that its connection ends; empty: it was lost
    bool leaves_itself{false};  ///< that is its own word, which no operator takes back
    std::deque<std::uint64_t>
        replaced;  ///< former incarnations, newest last, at most `max_replaced`
  };

  [[nodiscard]] entry* find(std::string_view name);
  [[nodiscard]] const entry* find(std::string_view name) const;
  [[nodiscard]] entry* find(std::string_view name, std::uint64_t incarnation);
  [[nodiscard]] std::string names_there_are() const;
  [[nodiscard]] result<void> may_cancel_drain(std::string_view name) const;
  [[nodiscard]] static bool is_there(const entry& e);
  [[nodiscard]] bool still_leaves(const entry& e, const node_info& node, steady_time now) const;
  [[nodiscard]] result<void> check_identity(const registration_request& request) const;
  [[nodiscard]] result<entry*> named_by_file(const node_info& node);
  [[nodiscard]] result<void> check_slot(const node_info& node, const expected_slot& slot) const;
  [[nodiscard]] result<void> check_replacement(const node_info& node, const entry& e,
                                               steady_time now) const;
  [[nodiscard]] std::chrono::milliseconds suspect_after() const noexcept;
  [[nodiscard]] std::chrono::milliseconds change_interval() const noexcept;
  [[nodiscard]] std::chrono::milliseconds load_interval() const noexcept;
  void record_load(entry& e, const heartbeat& beat);
  [[nodiscard]] static bool former(const entry& e, std::uint64_t incarnation);
  void retire(entry& e, std::uint64_t incarnation);
  void fail_itself(entry& e, const std::string& why);
  void judge(entry& e, steady_time now);
  void judge_collecting(steady_time now);
  void change(entry& e, node_state to, std::string reason);

  // -- nodes that no file names (membership_open.cpp)

  [[nodiscard]] const open_stage* open_stage_of(std::string_view stage) const;
  [[nodiscard]] std::string stages_that_are_open() const;
  [[nodiscard]] result<entry*> joining(const node_info& node, steady_time now);
  [[nodiscard]] result<void> check_replica(const node_info& node) const;
  [[nodiscard]] result<void> make_room(const open_stage& stage, steady_time now);
  entry& enter(expected_slot slot);
  [[nodiscard]] std::uint32_t replica_number(std::string_view stage, std::string_view replica);
  void reshape(const node_info& node);
  void refuse_for_good(std::uint64_t life);
  void forget(std::size_t index, std::string why);
  void forget_the_gone(steady_time now);
  void restore_joined(const membership_record::node& node, steady_time now);
  void restore_life(entry& e, const membership_record::node& node, steady_time now);

  membership_options options_;
  std::vector<entry> entries_;           ///< those of the file first, in its order
  std::deque<std::uint64_t> forgotten_;  ///< lives of nodes that joined, over for good, newest last
  std::uint32_t last_joined_replica_{0};
  std::map<std::string, std::size_t, std::less<>> index_;
  std::uint64_t epoch_{0};
  std::uint64_t broadcast_epoch_{0};
  bool lesser_news_{false};  ///< since the last broadcast, under its epoch
  bool collecting_{true};
  std::optional<steady_time> collects_from_;  ///< empty: it has not begun
  std::optional<steady_time> last_broadcast_;
  std::size_t last_told_{0};  ///< entries in it
  std::optional<steady_time> last_tick_;
  std::optional<steady_time> restored_;  ///< when, if anything was
  std::vector<node_transition> transitions_;
};

}  // namespace troupe::actors
