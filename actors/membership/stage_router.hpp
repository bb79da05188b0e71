#pragma once

/// Chooses a replica of one stage. A plain class of the `router`, without threads, I/O or a clock.
///
/// A replica is a candidate while every one of its ranks is `up`:
///
/// - `round_robin`: the candidate after the last one chosen;
/// - `least_queue_length`: the shortest queue, round robin on ties;
/// - `random`: any, by a seeded generator.
///
/// The queue of a rank is the length in its last heartbeat, plus the requests placed and less those
/// ended since; a replica is as busy as its busiest rank.
///
/// **Ease-in.** A replica whose ranks have just come up, for the first time or in a new life, is
/// empty and cold, and has the shortest queue of all. It gets the fewer requests the shorter it has
/// been up. Its share is
///
///     1 - (uptime of the longest-running candidate - its own uptime) / ease_in
///
/// where both uptimes count up to `ease_in`. A newcomer beside old candidates thus begins with
/// nearly nothing and has its full share after `ease_in`; if all start together, or there is only
/// one candidate, none is held back (a lag of up to a twentieth of `ease_in` counts as together);
/// and the second of two newcomers follows the first. A replica that was only `suspect`, or `down`
/// in the same life, still has its cache and is not eased in again. Nor is a replica that, by the
/// record, served a previous supervisor: it counts as up for the whole of `ease_in`.
///
/// **Open stages.** Their replicas are those that the membership shows. A replica of which no node
/// is shown any more leaves its place to the next one that joins; `life` tells the two apart.
///
/// Effect of a share: with `round_robin` and on ties a replica takes that part of its turns, spread
/// evenly, by a counter; `random` draws by shares; `least_queue_length` lengthens the newcomer's
/// queue by the missing part of its share, as a part of the mean queue of the candidates with a
/// full share.

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <random>
#include <span>
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
  bool open{false};       ///< no file names the stage's nodes: `add` is not called
};

class stage_router {
 public:
  /// Which replicas may be chosen; empty: any.
  using filter = std::function<bool(std::size_t replica)>;

  /// Identifies a placement for `ended`.
  struct receipt {
    std::size_t replica{0};
    std::uint64_t at{0};
  };
  static constexpr std::uint32_t full_share = 1u << 16;

  explicit stage_router(stage_options options);
  /// Adds one rank of one replica. All ranks are added before the first event.
  void add(const expected_slot& slot);

  // -- events

  /// See `router::remember`.
  void remember(std::uint64_t epoch) { remembered_ = epoch; }
  /// A node that is not in `members` is absent.
  void update(const membership& members, steady_time now);
  /// Returns whether the node belongs to this stage. The load of a former incarnation is ignored.
  bool load(std::string_view name, std::uint64_t incarnation, const load_report& report);
  /// Chooses a replica by the policy; one of `avoid` only if no other is up. At least one candidate
  /// must pass `may`. `turn` (0 or 1) says whose round it is: if a stage sends to itself, the two
  /// sides of a request would otherwise divide the replicas between them.
  [[nodiscard]] std::size_t choose(steady_time now, const std::vector<std::size_t>& avoid = {},
                                   const filter& may = {}, std::size_t turn = 0);
  /// Counts a request that goes to that replica, by whatever choice.
  [[nodiscard]] receipt place(std::size_t replica);
  void ended(receipt what);
  /// Sentences for the log about replicas that are eased in.
  [[nodiscard]] std::vector<std::string> take_notes() { return std::exchange(notes_, {}); }

  // -- properties

  [[nodiscard]] const std::string& name() const noexcept { return options_.name; }
  [[nodiscard]] bool is_open() const noexcept { return options_.open; }
  /// Notes that an edge leads from the stage to itself.
  void becomes_own_mate() noexcept { own_mate_ = true; }
  [[nodiscard]] bool is_own_mate() const noexcept { return own_mate_; }
  /// The number of replicas that exist or existed: every replica is a number below it.
  [[nodiscard]] std::size_t size() const noexcept { return replicas_.size(); }
  /// The fingerprint of its ranks' layout. All zero if unknown.
  [[nodiscard]] kvcache::layout_fingerprint fingerprint(std::size_t replica) const;
  [[nodiscard]] bool has_candidate(const filter& may = {}) const;
  [[nodiscard]] bool is_candidate(std::size_t replica) const { return replicas_[replica].all_up(); }
  /// Grows whenever a rank of the replica starts a new life.
  [[nodiscard]] std::uint64_t life(std::size_t replica) const { return replicas_[replica].life; }
  [[nodiscard]] std::uint32_t id(std::size_t replica) const { return replicas_[replica].id; }
  /// "replica 3", or that it is gone.
  [[nodiscard]] std::string title(std::size_t replica) const;
  /// The replicas that these nodes belong to.
  [[nodiscard]] std::vector<std::size_t> replicas_of(const std::vector<std::string>& nodes) const;
  /// Whether a rank of the replica was taken into the cluster after that epoch, first or again.
  [[nodiscard]] bool taken_in_since(std::size_t replica, std::uint64_t epoch) const;
  /// Whether all ranks of the placement's replica are still in the lives that the request went to.
  [[nodiscard]] bool has(receipt what) const;
  /// In rank order.
  [[nodiscard]] std::vector<node_info> ranks(std::size_t replica) const;
  /// Ranks that are not up, with their states: of the whole stage, or of one replica.
  [[nodiscard]] std::string missing() const;
  [[nodiscard]] std::string missing(std::size_t replica) const;
  /// The queue length of the replica with that id; 0 if there is none.
  [[nodiscard]] std::uint64_t queue_length(std::uint32_t id) const;

 private:
  struct rank_view {
    std::string name;
    bool registered{false};
    node_state state{node_state::down};
    node_info info;
    std::uint32_t queue_length{0};    ///< of the last heartbeat
    std::uint64_t placed_since{0};    ///< since the last heartbeat
    std::uint64_t finished_since{0};  ///< requests that the last heartbeat counted and that ended
    std::uint64_t heard_at{0};        ///< time of the last heartbeat, in `clock_`
    std::uint64_t born_at{0};         ///< start of this life, in `clock_`
    std::uint64_t registered_at{0};   ///< `member::registered`

    [[nodiscard]] bool up() const { return registered && state == node_state::up; }
    [[nodiscard]] std::uint64_t queue() const;
    void heard(std::uint32_t queue, std::uint64_t at);
  };
  struct replica_view {
    std::uint32_t id{0};
    std::vector<rank_view> ranks;  ///< empty: the place is free
    std::uint64_t life{0};
    std::uint64_t came_up_life{0};  ///< the last life in which all ranks were up
    steady_time came_up{};          ///< when all ranks were first up in that life
    std::uint32_t credit{0};        ///< towards its next turn, below `full_share`

    [[nodiscard]] bool all_up() const;
    [[nodiscard]] std::uint64_t queue() const;
  };
  /// A candidate and the part of a full share that it gets now.
  struct offer {
    std::size_t replica{0};
    std::uint32_t share{full_share};
  };

  [[nodiscard]] static std::string missing_of(std::span<const replica_view> replicas);
  /// For an open stage: adjusts the replicas and their ranks to the membership.
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
