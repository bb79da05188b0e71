#pragma once

/// State shared by the parts of the simulated cluster: time, chance, processes, the network and the
/// verdict.

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "troupe/actors/membership/membership.hpp"
#include "troupe/actors/operations/cache_leases.hpp"
#include "troupe/actors/operations/member_watch.hpp"
#include "troupe/actors/operations/node_drain.hpp"
#include "troupe/kvcache/block_pool.hpp"

#include "simulation.hpp"
#include "simulation_scenario.hpp"
#include "timeline.hpp"
#include "watch_judge.hpp"

namespace troupe::actors::cluster_simulation {

using simulation::dice;

struct node_life;  // not the one of leases

/// One life of a process: a node or the supervisor.
struct process {
  process() = default;
  explicit process(std::uint64_t life) : incarnation{life} {}

  std::uint64_t incarnation{0};
  bool alive{true};
  moment stands_still_until{};
  std::deque<std::function<void()>> held_up;  ///< events that arrived while it was frozen, in order
  moment awake_since{};                       ///< it has not been frozen since then
  /// Time that its clock lost while its host was suspended, which a monotonic clock may not count.
  microseconds behind{0};
  std::vector<std::pair<moment, microseconds>> suspended;  ///< end and length of each suspension
};

class link;
class transfer;

/// Orders the supervisor's messages: the number of its life, and the epoch.
using stage_of_things = std::pair<std::uint32_t, std::uint64_t>;

/// A membership list as published to all nodes.
struct told_members {
  membership list;
  stage_of_things when;
  std::vector<const member*> by_node;  ///< null if never registered
};

/// A connection of a node's life to a supervisor's life.
struct connection {
  std::shared_ptr<node_life> node;
  std::shared_ptr<struct supervisor_life> supervisor;
  bool broken{false};
  std::array<moment, 2> last{};  ///< keeps the order of messages, for each direction
};

struct node_life : process {
  node_life(std::uint32_t number, std::uint32_t blocks, std::uint64_t life)
      : process{life}, node{number}, pool{blocks}, holder(blocks, 0), leases{leases_of(life)} {}

  /// Shorter than the heartbeat timeout and than many freezes.
  static cache_leases::options leases_of(std::uint64_t life) {
    return {troupe::incarnation{life}, milliseconds{3000}};
  }

  std::uint32_t node{0};
  node_info info;
  // -- towards the supervisor
  std::shared_ptr<connection> supervisor;
  bool registered{false};
  moment registered_since{};
  std::optional<moment> asking_since;
  std::uint64_t beats{0};
  stage_of_things seen{};
  moment born{}, died{};
  // -- what its engine and operators say of it
  std::string failure;  ///< reported by the engine; empty if it can serve
  moment failed_last{};
  node_drain drain;
  bool leaves{false};
  bool late{false};  ///< the deadline of its drain has passed
  std::vector<std::pair<std::shared_ptr<class transfer>, int>> busy_with;  ///< and the side
  std::shared_ptr<node_life> former;  ///< previous life of the same node, perhaps only frozen
  // -- the cache
  kvcache::block_pool pool;
  std::vector<std::uint64_t> holder;  ///< by block: the transfer for which it was last allocated
  std::map<kvcache::waiter_id, std::function<void(result<kvcache::allocation>)>> waiters;
  cache_leases leases;
  struct hold {
    std::shared_ptr<class transfer> of;
    int side{0};
    std::uint32_t under{0};  ///< the supervisor's life whose list was current at the start
  };
  std::map<std::uint64_t, hold> holds;                 ///< by operation
  std::shared_ptr<const struct told_members> members;  ///< the newest list received
  std::vector<std::function<void()>> callers;          ///< told when its process is gone
  // -- its engine, where it watches members
  std::optional<member_watch> watch;
  testing::watch_judge told;
  std::minstd_rand
      takes;  ///< how many events it takes; separate from the chance of the rest of the world
  // -- towards its peers
  std::map<std::uint64_t, std::shared_ptr<link>> links;  ///< by the peer's incarnation

  void take_apart();
};
using life = std::shared_ptr<node_life>;

/// The cluster as a whole: each node's current life, which nodes reach each other, and the verdict.
class world {
 public:
  explicit world(const options& of);
  ~world();
  world(const world&) = delete;
  world& operator=(const world&) = delete;

  report run();

  // -- used by the parts

  timeline time;
  dice chance;
  const options& given;
  report told;

  [[nodiscard]] moment now() const noexcept { return time.now(); }
  /// A random duration in [least, most].
  [[nodiscard]] microseconds between(microseconds least, microseconds most) {
    return least +
           microseconds{chance.next() % static_cast<std::uint64_t>((most - least).count() + 1)};
  }
  [[nodiscard]] moment clock_of(const process& whose) const { return now() - whose.behind; }
  /// The time since then by that process's clock.
  [[nodiscard]] microseconds passed(const process& whose, moment since) const;
  [[nodiscard]] microseconds one_way() { return between(microseconds{20}, slowest_); }
  [[nodiscard]] std::uint64_t draw_incarnation() { return chance.next() | 1U; }

  /// Runs an event in a process: at once, when it wakes, or never if it is dead.
  void in(const std::shared_ptr<process>& where, std::function<void()> what);
  void stand_still(const std::shared_ptr<process>& who, microseconds time);
  /// Like `stand_still`, and its clock stops too.
  void suspend(const std::shared_ptr<process>& who, microseconds time);

  /// Records a violation; only the first is kept.
  void violate(const std::string& what);
  void require(bool holds, std::string_view what) {
    if (!holds) violate(std::string{what});
  }
  /// Records an event in the digest and the trace.
  void note(std::string_view what, std::uint64_t a = 0, std::uint64_t b = 0);
  /// Adds a line to the trace alone.
  void trace(const std::string& line);

  static constexpr std::uint32_t supervisor_end = 0xFFFF'FFFF;
  [[nodiscard]] bool reach(std::uint32_t a, std::uint32_t b) const {
    return cuts_.empty() || !cuts_.contains({std::min(a, b), std::max(a, b)});
  }

  [[nodiscard]] const life& life_of(std::uint32_t node) const { return lives_[node]; }
  [[nodiscard]] const std::vector<life>& lives() const noexcept { return lives_; }
  [[nodiscard]] std::optional<std::uint32_t> number_of(const std::string& name) const;
  /// Checks that a node which the supervisor calls silent really is.
  void check_alarm(const node_transition& change);

  // -- nodes (nodes.cpp)

  void start_node(std::uint32_t node);
  void end(const life& gone);
  void hear_members(const life& at, const std::shared_ptr<const told_members>& members);
  [[nodiscard]] std::shared_ptr<const told_members> published(membership list,
                                                              std::uint32_t by) const;
  /// Tells the engine of the members; it takes some of the events.
  void watch_members(const life& at);
  void serve_pool(const life& at);
  /// Handles lapsed holds at a node.
  void lapsed(const life& at, const std::vector<cache_leases::lapse>& lapses);
  /// The number of its transfers that have not settled.
  [[nodiscard]] std::uint32_t busy(const life& at) const;
  /// The supervisor orders the node to drain. `late`: it leaves even with work in progress.
  void ordered(const life& at, const drain_order& order, bool late);
  /// A supervisor begins to drain that life, with a deadline by the supervisor's clock.
  void drain_begins(const life& at, std::uint32_t by, moment deadline);
  [[nodiscard]] bool may_be_placed_on(const node_info& node) const;

  // -- the wire between a node and the supervisor (nodes.cpp)

  void send(const std::shared_ptr<connection>& over, bool to_supervisor,
            std::function<void()> what);
  void break_connection(const std::shared_ptr<connection>& which, microseconds seen_within);
  /// The node has noticed that the supervisor is lost.
  void lost_supervisor(const life& at, const std::shared_ptr<connection>& which);

  /// Registers how to break a reference cycle when the world ends.
  void takes_apart(std::function<void()> how) { apart_.push_back(std::move(how)); }

  std::shared_ptr<supervisor_life> supervisor;
  std::uint32_t supervisors{0};           ///< lives so far
  std::optional<membership_record> kept;  ///< saved for the supervisor's next life

 private:
  void start_supervisor();
  // -- nodes
  void beat(const life& at);
  void reach_supervisor(const life& at);
  void register_node(const life& at);
  void registered(const life& at, const std::shared_ptr<connection>& over,
                  const registration& answer);
  void say_alive(const life& at);
  void say_leaving(const life& at);
  void leave_if_drained(const life& at);
  void check_departure(const life& at);
  void check_lapse(const life& at, const cache_leases::lapse& over);
  // -- faults (faults.cpp)
  void plan_faults();
  void plan_fault(std::size_t which);
  void something_goes_wrong();
  [[nodiscard]] std::uint64_t fate(std::uint64_t below);
  [[nodiscard]] microseconds fate_between(microseconds least, microseconds most);
  [[nodiscard]] std::uint32_t fated_node();
  void crash_a_node();
  void freeze_a_node();
  void replace_a_frozen_node();
  void cut_a_node_from_the_supervisor();
  void cut_a_pair();
  void cut_half_from_the_supervisor();
  void break_a_link();
  void crash_the_supervisor();
  void freeze_the_supervisor();
  void slow_the_network();
  void drain_a_node();
  void fail_an_engine();
  void suspend_a_node();
  void suspend_the_supervisor();
  void stop_the_supervisors_ticks();
  void cut(std::uint32_t a, std::uint32_t b, microseconds time);
  void fault(const std::string& what, std::optional<std::uint32_t> node = std::nullopt) {
    ++told.faults[what];
    if (node) told.met.insert(what + (*node < given.prefills ? ": prefill" : ": decode"));
    if (given.traced) trace("fault: " + what + (node ? " " + slots_[*node].name : ""));
  }
  // -- the end
  void check_standing();
  void check_node(const life& at);
  void check_watch(const life& at);
  void check_drain(const life& at, moment well);
  void check_the_end();

  std::vector<expected_slot> slots_;
  struct drain_in_progress {
    std::uint32_t by{0};  ///< number of the supervisor's life
    moment deadline{};
  };
  std::map<std::uint64_t, drain_in_progress>
      drains_;                    ///< by incarnation, including drains that have ended
  std::vector<moment> cut_last_;  ///< by node: when it last could not reach the supervisor
  moment supervisor_since_{};     ///< since when it has been alive and not frozen
  std::map<std::string, std::uint32_t> numbers_;
  std::vector<life> lives_;
  std::set<std::pair<std::uint32_t, std::uint32_t>> cuts_;
  microseconds slowest_{2000};
  std::deque<std::string> lines_;
  bool faults_are_over_{false};
  const moment begun_{time.now()};
  std::size_t next_draw_{0};  ///< of the current fault
  std::unique_ptr<class frontend> frontend_;
  std::vector<std::function<void()>> apart_;
};

}  // namespace troupe::actors::cluster_simulation
