#pragma once

/// The supervisor's table of the cluster's nodes and their states. A plain class without threads,
/// I/O or a clock; time comes in with every call. The `supervisor` actor feeds it and carries out
/// its decisions.
///
/// One entry per name of the deployment. A name holds at most one incarnation at a time; every
/// other incarnation under that name is told to register again or is refused.
///
/// Nodes that no file names join open stages. A node gets an entry when it first registers, and
/// loses it when it has been down for `forget_after`, when it has been down for longest in a stage
/// that is full, or when its replica comes back in another shape. An incarnation that lost its
/// entry is refused for good.
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
/// `joining` if the old one is provably or probably gone, that is, if it has been silent for as
/// long as a suspect or if the new one has bound the host and port of the old one; else
/// `already_exists`.
///
/// (2) The same incarnation again, of a node that is or was drained: `leaving`. A broken connection
/// does not cancel a drain; only another incarnation starts afresh.
///
/// (3) The connection was lost.
///
/// (4) Refused if the node drains already. A node that leaves by its own decision, and is not gone,
/// counts as drained from then on.
///
/// (5) `suspect` if the node has been silent for as long as a suspect. Refused if nobody drains it,
/// if it leaves by its own decision, or if it was told to leave.
///
/// (6) `leaving` if the node is down by its own report: it lives, and now stops in good order.
///
/// A node that reports a failure of its own (`heartbeat.failure`) is `down` from then on, whatever its
/// heartbeats say; they are still answered `known`, and its silence is judged. It comes back as
/// every down node does: by registering. A report does not change a `leaving` node.
///
/// A table that is restored from a record knows the lives of the previous supervisor. Lives that
/// were `joining`, `up` or `suspect` are `joining`, without having registered here. Their
/// heartbeats are `unknown`, they get the whole heartbeat timeout to register, and they give way to
/// any other life of their name.
///
/// Every table collects for one heartbeat timeout, and its lists say so: nodes that a previous
/// supervisor took in may still register, even if no record names them. After that, a node that is
/// not in the list is not a member.
///
/// A `joining` node has registered and sent nothing since; its first heartbeat makes it `up`. It
/// gets the whole heartbeat timeout for that. An incarnation that was replaced by another one is
/// refused as `stale_incarnation` from then on, whatever becomes of its successor.

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
  std::string host{};  ///< from the deployment; `auto`: any
};

/// A stage whose nodes no file names.
struct open_stage {
  std::string name;
  node_role role{node_role::both};
  std::uint32_t max_nodes{256};
};

/// Checks the role, replica, rank, name and labels that a node announces to join that stage.
/// `invalid_config` naming what is wrong.
[[nodiscard]] result<void> check_announcement(const node_info& node, const open_stage& stage);

/// How the name of a slot is used.
struct slot_use {
  enum class kind : std::uint8_t {
    unused,   ///< no node ever had the name
    used,     ///< by a life that is present
    awaited,  ///< a life that the previous supervisor took in may still come back
    down,     ///< its last life is down, and some present node does not know that yet
    fenced,   ///< its last life is down, and every present node knows that
  };
  kind how{kind::unused};
  std::uint64_t incarnation{0};  ///< of the last life
  std::uint64_t down_epoch{0};   ///< epoch at which that life went down, if it did
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
  std::optional<node_state> from;  ///< empty: it was absent
  node_state to{node_state::joining};
  std::uint64_t epoch{0};  ///< made by this change
  std::string reason;
  bool forgotten{false};  ///< the entry was removed; `to` is `down`
};

enum class heartbeat_verdict : std::uint8_t {
  known,    ///< recorded
  unknown,  ///< no such name and incarnation is registered, or it was declared down: it must
            ///< register again
  stale,    ///< another incarnation replaced this one, which cannot come back
};

class membership_table {
 public:
  explicit membership_table(membership_options options);

  // -- events

  /// A node registers. The reply carries the replica that it serves. Errors: `version_mismatch`,
  /// `invalid_config` (another cluster, or in conflict with the deployment's entry of that name),
  /// `not_found` (a name that the deployment does not have), `already_exists`, `stale_incarnation`.
  /// For a node that joins an open stage also: `layout_mismatch` (differs from the other ranks of
  /// its replica), `overloaded` (the stage is full).
  [[nodiscard]] result<registration> registered(const registration_request& request,
                                                steady_time now);
  /// A node reports that it lives, and its load. Never shortens its remaining time. A load that was
  /// overtaken by a newer one (by sequence) is not recorded.
  [[nodiscard]] heartbeat_verdict heard(const heartbeat& beat, steady_time now);
  /// A node stops in good order. Ignored, returning false, unless that incarnation is present and
  /// not down. An incarnation that is down by its own report counts as present, and becomes
  /// `leaving` too.
  bool leave(std::string_view name, std::uint64_t incarnation, steady_time now);
  /// An operator drains a node. Returns the incarnation that drains from now on. Errors, all of
  /// which say what to do: `not_found` (no such node, or it never registered), `invalid_config`
  /// (the supervisor itself), `peer_lost` (it is down), `already_exists` (it drains already).
  [[nodiscard]] result<std::uint64_t> drain(std::string_view name);
  /// An operator cancels the drain of a node, and with it that of all ranks of its replica. Returns
  /// the lives that serve on. Errors, all of which say what to do: `not_found` (no such node, or
  /// nobody drains it), `peer_lost` (too late: it is down, leaves by its own decision, or was told
  /// to leave).
  [[nodiscard]] result<std::vector<node_life>> cancel_drain(std::string_view name, steady_time now);
  /// Sets the reason that is shown of a draining node. Changes neither its state nor the epoch.
  void draining(std::string_view name, std::uint64_t incarnation, std::string reason);
  /// The node was told to leave. `reason` is shown from now on, and says why the node is down once
  /// its connection ends.
  void drained(std::string_view name, std::uint64_t incarnation, std::string reason);
  /// The connection to a node broke or its process ended. Ignored, returning false, unless that
  /// incarnation is present.
  bool connection_lost(std::string_view name, std::uint64_t incarnation, std::string_view reason,
                       steady_time now);
  /// Takes over the record of the previous supervisor, before any other event. Its epochs are not
  /// used again; nodes that the deployment no longer has are left out.
  void restore(const membership_record& left, steady_time now);
  /// Judges silence. To be called several times per heartbeat interval.
  void tick(steady_time now);
  /// Called before every judgement by the clock. During a long time without a tick this process
  /// stood still, and messages that the nodes sent meanwhile still wait to be read; that time is
  /// not held against any node. Returns its length; 0 if the process did not stand still.
  std::chrono::steady_clock::duration stood_still(steady_time now);

  // -- results

  /// Changes since the last call, oldest first.
  [[nodiscard]] std::vector<node_transition> take_transitions();
  /// Returns the full list if its epoch was not broadcast yet and the last broadcast is
  /// `broadcast_interval` ago. The interval is longer in clusters of hundreds of nodes, since each
  /// node is told of each: 3 s after a list of 1,000. Loads are less urgent news: they go out once
  /// per heartbeat interval (less often in large clusters), under the same epoch. So does the news
  /// that the table has finished collecting.
  [[nodiscard]] std::optional<membership> take_broadcast(steady_time now);

  // -- properties

  /// Every node that registered since the supervisor started, in the deployment's order, followed
  /// by the nodes that joined open stages.
  [[nodiscard]] membership view() const;
  [[nodiscard]] std::uint64_t epoch() const noexcept { return epoch_; }
  /// The record that must survive the supervisor. Includes `epoch_reserve` epochs that the
  /// supervisor may use before the next record.
  [[nodiscard]] membership_record record() const;
  /// The number of nodes that live: all that are not `down`, or are `down` by their own report.
  [[nodiscard]] std::size_t nodes_there() const;
  /// Whether that node is `down` by its own report: it lives, and its connection stands.
  [[nodiscard]] bool reports_failure(std::string_view name) const;
  /// Empty when that name never registered.
  [[nodiscard]] std::optional<node_state> state_of(std::string_view name) const;
  [[nodiscard]] std::optional<std::uint64_t> incarnation_of(std::string_view name) const;
  /// The ranks of a node's replica, including the node. Empty if there is no such node.
  [[nodiscard]] std::vector<expected_slot> replica_of(std::string_view name) const;
  /// The uses of the names, as claims need them (`name_leases.hpp`), in the order of
  /// `options().slots`.
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
    bool joined{false};                       ///< joined an open stage: no file names it
    std::optional<steady_time> down_since{};  ///< only if it joined: when `tick` first saw it down
    bool reported{false};                     ///< `down` by its own report
    bool remembered{false};                   ///< from a record, and has not registered here
    std::uint64_t sequence{0};
    std::uint64_t registered{0};  ///< `member::registered`
    std::uint64_t adopted{0};     ///< epoch of the newest membership that this life has
    std::uint64_t down_epoch{0};  ///< epoch at which it went down, while it is down
    steady_time heard{};
    bool drains{false};         ///< drains, or did before it went down
    std::string farewell;       ///< the reason once its connection ends; empty: it was lost
    bool leaves_itself{false};  ///< by its own decision, which no operator can cancel
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
  std::vector<entry> entries_;           ///< nodes of the file first, in its order
  std::deque<std::uint64_t> forgotten_;  ///< lives of joined nodes, over for good, newest last
  std::uint32_t last_joined_replica_{0};
  std::map<std::string, std::size_t, std::less<>> index_;
  std::uint64_t epoch_{0};
  std::uint64_t broadcast_epoch_{0};
  bool lesser_news_{false};  ///< less urgent news since the last broadcast, under its epoch
  bool collecting_{true};
  std::optional<steady_time> collects_from_;  ///< empty: collecting has not begun
  std::optional<steady_time> last_broadcast_;
  std::size_t last_told_{0};  ///< entries in the last broadcast
  std::optional<steady_time> last_tick_;
  std::optional<steady_time> restored_;  ///< when a record was restored; empty: none was
  std::vector<node_transition> transitions_;
};

}  // namespace troupe::actors
