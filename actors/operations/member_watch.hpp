#pragma once

/// What an engine that watches its cluster hears of the other members, life by life. Fed with the lists that
/// supervisors publish; clockless, not thread-safe.
///
/// Of each name it knows the life that the engine was told of, and the one that is there. What waits to be
/// told is the difference of the two, which bounds it: the end of the former life, and the present one.
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
/// (1) A supervisor that was restarted gives nodes a heartbeat timeout to register again. Who it does not
/// show by then is no member. Supervisors may end before that, one after the other: at most `max_unspoken`
/// lives wait for one to say so, and then the longest unspoken of is taken for gone.
///
/// A supervisor's record may be older than what is known here: it shows a life as `joining` that the one
/// before it had seen replaced. That is no news, and not looked at.

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
  /// `self`: of this name nothing is told.
  explicit member_watch(std::string self) : self_{std::move(self)} {}

  /// Those of one supervisor in the order of their epochs.
  void see(const membership& list);
  /// How many events wait.
  [[nodiscard]] std::size_t size() const noexcept { return waiting_; }
  /// The next event: the engine is told by that. There must be one.
  [[nodiscard]] event_member pop();

  static constexpr std::size_t max_unspoken = 4096;
  /// Lives that were replaced, of all names, that are remembered.
  static constexpr std::size_t max_over = 4096;

 private:
  struct told_life {
    std::uint64_t incarnation{0};
    member_state state{member_state::joining};
  };
  struct name {
    std::optional<told_life> told;      ///< and its end was not
    std::optional<event_member> end;    ///< of that life, which waits
    std::optional<event_member> there;  ///< the life that is
    std::uint64_t shown_by{0};          ///< the supervisor that showed the name last
    std::uint64_t shown_in{0};          ///< which of the lists that was
    std::optional<std::list<std::string>::iterator> turn;  ///< in `turns_`, while an event waits

    [[nodiscard]] std::size_t waiting() const;
  };
  using names = std::map<std::string, name, std::less<>>;

  void see(const member& shown, std::uint64_t supervisor);
  void end_forgotten(const membership& list);
  static void end_life(name& of, std::string why);
  [[nodiscard]] bool is_old_news(const member& shown) const;
  void remember_over(std::uint64_t incarnation);
  /// What follows from a change of a name of which so many events waited before. It may be gone then.
  void settle(names::iterator of, std::size_t before);

  std::string self_;
  names names_;
  std::list<std::string> turns_;  ///< names of which an event waits, longest first
  std::size_t waiting_{0};
  std::uint64_t lists_{0};
  std::unordered_set<std::uint64_t> over_;
  std::deque<std::uint64_t> over_in_order_;  ///< the same, newest last
};

}  // namespace troupe::actors
