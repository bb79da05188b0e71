#pragma once

/// The events of a watching engine about the other members, life by life. Fed with the lists that
/// supervisors publish; clockless, not thread-safe.
///
/// For each name it keeps the life that the engine was told of, and the present one. The waiting
/// events are the difference of the two, which bounds them: the end of the former life, and the
/// present one.
///
///   told  there  the newest list shows             waits then
///   ----  -----  --------------------------------  -----------------------------------------------
///   -     -      X                                 X
///   -     X      X lost, or not any more           nothing: X came and went
///   -     X      Y                                 Y
///   X     X      X in another state                X
///   X     X      X lost                            the end of X
///   X     X      Y                                 the end of X, then Y
///   X     X      neither                           the end of X, it was forgotten; but nothing while
///                                                  another supervisor than showed X collects (1)
///   X     -      X again, before its end is taken  X, if its state is another
///
/// (1) A restarted supervisor gives nodes a heartbeat timeout to register again. Nodes that it does
/// not show by then are no members. Several supervisors may end before that, one after the other:
/// at most `max_unspoken` lives wait for a supervisor to decide, beyond that the one that was not
/// mentioned for longest is taken for gone.
///
/// A supervisor's record may be older than what is known here: it shows a life as `joining` that
/// the supervisor before it had seen replaced. Such an entry is ignored.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>

#include "troupe/actors/cluster_messages.hpp"
#include "troupe/actors/engine_types.hpp"

namespace troupe::actors {

class member_watch {
 public:
  /// Nothing is told about the name `self`.
  explicit member_watch(std::string self) : self_{std::move(self)} {}

  /// Takes a list; those of one supervisor must come in the order of their epochs. If memory runs
  /// out, the names before the one that found none have changed, and the list may come again.
  void see(const membership& list);
  [[nodiscard]] std::size_t size() const noexcept { return waiting_; }
  /// Removes and returns the next event, which counts as told. There must be one. It stays if there is
  /// no memory for it.
  [[nodiscard]] event_member pop();

  static constexpr std::size_t max_unspoken = 4096;
  /// Bound on the replaced lives that are remembered, of all names together.
  static constexpr std::size_t max_over = 4096;

 private:
  struct told_life {
    std::uint64_t incarnation{0};
    member_state state{member_state::joining};
  };
  using turn_list = std::list<const std::string*>;
  struct name {
    std::optional<told_life> told;      ///< its end was not told yet
    std::optional<event_member> end;    ///< the waiting end of the life that was told
    std::optional<event_member> there;  ///< the present life
    std::uint64_t shown_by{0};          ///< the supervisor that last showed the name
    std::uint64_t shown_in{0};          ///< the number of that list
    turn_list no_turn{};                ///< has the entry of `turn`, unless `turns_` has it
    turn_list::iterator turn{};         ///< in `turns_` while an event waits

    [[nodiscard]] std::size_t waiting() const noexcept;
  };
  using names = std::map<std::string, name, std::less<>>;

  void see(const member& shown, std::uint64_t supervisor);
  void end_forgotten(const membership& list);
  [[nodiscard]] names::iterator add(const std::string& called);
  static void end_life(name& of, std::string why) noexcept;
  [[nodiscard]] bool is_old_news(const member& shown) const;
  void remember_over(std::uint64_t incarnation);
  /// Updates `turns_` and counts after a change of a name that had `before` waiting events. May
  /// erase the name.
  void update_turn(names::iterator of, std::size_t before) noexcept;

  std::string self_;
  names names_;
  turn_list turns_;  ///< the names with a waiting event, longest wait first
  std::size_t waiting_{0};
  std::uint64_t lists_{0};
  std::unordered_set<std::uint64_t> over_;
  std::deque<std::uint64_t> over_in_order_;  ///< same entries, newest last
};

}  // namespace troupe::actors
