#pragma once

/// Chooses a replica of one stage. A plain class of the `router`, without threads, I/O or a clock.
///
/// A replica is a candidate while every one of its ranks is `up`:
///
/// - `round_robin`: the candidate after the last one chosen;
/// - `least_queue_length`: the shortest queue; ties go round;
/// - `random`: any, by a seeded generator.
///
/// The queue of a rank is the length in its last heartbeat, plus what was placed and less what
/// ended since; a replica is as busy as its busiest rank.
///
/// **Ease-in.** A replica whose ranks have come up only now, for the first time or in a new life,
/// is empty and cold: the shortest queue of all. It gets the fewer requests the shorter it has been
/// up. Its share is
///
///     1 - (how long the longest candidate is up - how long itself) / ease_in
///
/// where both count up to `ease_in`. So a newcomer beside old candidates begins with nearly nothing
/// and has its full share after `ease_in`; where all start together, or it is the only candidate,
/// nobody is held back (a lag of up to a twentieth of `ease_in` counts as together); and the second
/// of two newcomers follows the first. A replica that was only `suspect`, or `down` in one and the
/// same life, has its cache still and is not eased in again. Nor is one that served a supervisor
/// before this one, as far as its record goes: it counts as up for the whole of `ease_in`.
///
/// **Open stages.** Their replicas are those that the membership shows. One of which no node is shown
/// any more leaves its place to the next that joins; `life` tells the two apart.
///
/// What a share does: `round_robin` and ties take that part of its turns, spread evenly, by a
/// counter; `random` draws by shares; `least_queue_length` adds what is missing of the full share,
/// as a part of the mean queue of those that have theirs, to the newcomer's queue.

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "troupe/actors/cluster_messages.hpp"
#include "troupe/actors/membership/membership.hpp"

namespace troupe::actors {

enum class placement_policy : std::uint8_t { round_robin, least_queue_length, random };

struct stage_options {
  std::string name;
  placement_policy policy{placement_policy::round_robin};
  std::chrono::milliseconds ease_in{0};
  std::uint64_t seed{0};  ///< of `random`
  bool open{false};       ///< no file names its nodes: `add` is not called
};

class stage_router {
 public:
  /// Which replicas may be chosen; empty: any.
  using filter = std::function<bool(std::size_t replica)>;

  /// What `ended` needs to know of a placement.
  struct receipt {
    std::size_t replica{0};
    std::uint64_t at{0};
  };
  static constexpr std::uint32_t full_share = 1u << 16;

  explicit stage_router(stage_options options);
  /// One rank of one replica. All are added before the first event.
  void add(const expected_slot& slot);

  // -- events

  /// See `router::remember`.
  void remember(std::uint64_t epoch) { remembered_ = epoch; }
  /// Who is not in `members` is not there.
  void update(const membership& members, steady_time now);
  /// False when the node is of another stage. A former incarnation's load is ignored.
  bool load(std::string_view name, std::uint64_t incarnation, const load_report& report);
  /// A replica by the policy; one of `avoid` only where nobody else is up. There must be a candidate
  /// that `may` be chosen. `turn`: 0 or 1, whose round it is; where a stage sends to itself the two sides
  /// of a request would else share the replicas out between them.
  [[nodiscard]] std::size_t choose(steady_time now, const std::vector<std::size_t>& avoid = {},
                                   const filter& may = {}, std::size_t turn = 0);
  /// A request goes to that replica, whoever chose it.
  [[nodiscard]] receipt place(std::size_t replica);
  void ended(receipt what);
  /// Sentences for the log: who is eased in.
  [[nodiscard]] std::vector<std::string> take_notes() { return std::exchange(notes_, {}); }

  // -- properties

  [[nodiscard]] const std::string& name() const noexcept { return options_.name; }
  [[nodiscard]] bool is_open() const noexcept { return options_.open; }
  /// An edge leads from the stage to itself.
  void becomes_own_mate() noexcept { own_mate_ = true; }
  [[nodiscard]] bool is_own_mate() const noexcept { return own_mate_; }
  /// How many there are or were: every replica is a number below it.
  [[nodiscard]] std::size_t size() const noexcept { return replicas_.size(); }
  /// Of the layout of its ranks. All zero: not said.
  [[nodiscard]] kvcache::layout_fingerprint fingerprint(std::size_t replica) const;
  [[nodiscard]] bool has_candidate(const filter& may = {}) const;
  [[nodiscard]] bool is_candidate(std::size_t replica) const { return replicas_[replica].all_up(); }
  /// Grows whenever a rank of it starts a new life.
  [[nodiscard]] std::uint64_t life(std::size_t replica) const { return replicas_[replica].life; }
  [[nodiscard]] std::uint32_t id(std::size_t replica) const { return replicas_[replica].id; }
  /// "replica 3", or that it is gone.
  [[nodiscard]] std::string title(std::size_t replica) const;
  /// The replicas that these nodes belong to.
  [[nodiscard]] std::vector<std::size_t> replicas_of(const std::vector<std::string>& nodes) const;
  /// Whether a rank of it was taken into the cluster after that epoch: for the first time, or again.
  [[nodiscard]] bool taken_in_since(std::size_t replica, std::uint64_t epoch) const;
  /// Whether that request went to lives that all its ranks still lead.
  [[nodiscard]] bool has(receipt what) const;
  /// In rank order.
  [[nodiscard]] std::vector<node_info> ranks(std::size_t replica) const;
  /// Ranks that are not up, with their states: of the whole stage, or of one replica.
  [[nodiscard]] std::string missing() const;
  [[nodiscard]] std::string missing(std::size_t replica) const;
  /// Of the replica with that id; 0 when there is none.
  [[nodiscard]] std::uint64_t queue_length(std::uint32_t id) const;

 private:
  struct rank_view {
    std::string name;
    bool registered{false};
    node_state state{node_state::down};
    node_info info;
    std::uint32_t queue_length{0};    ///< of the last heartbeat
    std::uint64_t placed_since{0};    ///< since the last heartbeat
    std::uint64_t finished_since{0};  ///< of those that the last heartbeat counted
    std::uint64_t heard_at{0};        ///< the last heartbeat, in `clock_`
    std::uint64_t born_at{0};         ///< this life, in `clock_`
    std::uint64_t registered_at{0};   ///< `member::registered`

    [[nodiscard]] bool up() const { return registered && state == node_state::up; }
    [[nodiscard]] std::uint64_t queue() const;
    void heard(std::uint32_t queue, std::uint64_t at);
  };
  struct replica_view {
    std::uint32_t id{0};
    std::vector<rank_view> ranks;  ///< none: the place is free
    std::uint64_t life{0};
    std::uint64_t came_up_life{0};  ///< the life in which all ranks were up last
    steady_time came_up{};          ///< when they were up first in it
    std::uint32_t credit{0};        ///< towards its next turn, below `full_share`

    [[nodiscard]] bool all_up() const;
    [[nodiscard]] std::uint64_t queue() const;
  };
  /// A candidate and what part of a full share it gets now.
  struct offer {
    std::size_t replica{0};
    std::uint32_t share{full_share};
  };

  [[nodiscard]] static std::string missing_of(const std::vector<const rank_view*>& ranks);
  /// Of an open stage: as many replicas, of as many ranks, as the membership shows.
  void follow(const membership& members);
  void vacate(replica_view& replica);
  [[nodiscard]] std::size_t place_for(std::uint32_t id);
  void add_rank(std::size_t replica, std::string name, std::uint32_t rank);
  void update(rank_view& rank, replica_view& replica, const member& m);
  void begin_easing(steady_time now);
  [[nodiscard]] bool served_before(const replica_view& replica) const;
  [[nodiscard]] std::chrono::nanoseconds seniority(const replica_view& replica,
                                                   steady_time now) const;
  [[nodiscard]] std::vector<offer> offers(steady_time now,
                                          const std::vector<std::size_t>& avoid = {},
                                          const filter& may = {}, std::size_t turn = 0) const;
  [[nodiscard]] std::size_t in_turn(const std::vector<offer>& offers);
  [[nodiscard]] std::vector<offer> shortest(const std::vector<offer>& offers) const;
  [[nodiscard]] std::size_t drawn(const std::vector<offer>& offers);

  stage_options options_;
  std::vector<replica_view> replicas_;
  std::map<std::string, std::size_t, std::less<>> replica_of_;  ///< by the name of a node
  std::array<std::size_t, 2> next_{};                           ///< where the rounds go on
  bool own_mate_{false};
  std::uint64_t clock_{0};  ///< counts placements, heartbeats and lives, to tell which came first
  std::optional<std::uint64_t> remembered_;  ///< see `remember`
  std::vector<std::string> notes_;
  std::mt19937_64 random_;
};

}  // namespace troupe::actors
