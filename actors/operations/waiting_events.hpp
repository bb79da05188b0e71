#pragma once

#include <cstddef>
#include <list>
#include <map>

#include "troupe/actors/engine_types.hpp"

namespace troupe::actors {

struct waiting_event {
  event what;
  bool last{false};  ///< of its operation
};

/// Events that the engine has not taken, oldest first. The events of one operation are found
/// without scanning those of others. Layer events of one operation merge while they wait. Only `push`
/// needs memory; if there is none, nothing has changed.
class waiting_events {
 public:
  /// Returns whether the number of waiting events grew; otherwise the event was merged into the
  /// newest one of its operation.
  bool push(waiting_event e);
  /// Removes the oldest event. There must be one.
  [[nodiscard]] waiting_event pop() noexcept;
  /// Drops the newest event of the operation. There must be one.
  void drop_newest(operation_id operation) noexcept;
  /// Removes all events of the operation. Costs only as many steps as that operation has events.
  [[nodiscard]] waiting_events extract(operation_id operation) noexcept;
  /// Puts events in front of all others. Their operations must have no events here.
  void put_first(waiting_events events) noexcept;
  /// Whether the last event of the operation waits.
  [[nodiscard]] bool has_last(operation_id operation) const;
  [[nodiscard]] bool empty() const noexcept { return events_.empty(); }
  [[nodiscard]] std::size_t size() const noexcept { return events_.size(); }
  /// Shows the oldest events, up to `count` of them.
  template <class Look>
  void look_at(std::size_t count, Look&& look) const {
    for (auto at = events_.begin(); count > 0 && at != events_.end(); ++at, --count)
      look(at->event);
  }

 private:
  struct link {
    waiting_event event;
    std::list<link>::iterator next;  ///< of its operation; the newest has none
  };
  using place = std::list<link>::iterator;
  /// The waiting events of one operation.
  struct chain {
    place oldest, newest;
  };

  void append(waiting_event e);
  void merge_layers();
  void link_chains() noexcept;

  /// Merging starts at this size: an engine that takes its events has fewer.
  static constexpr std::size_t least_merged = 1024;

  std::list<link> events_;
  std::map<operation_id, chain> chains_;  ///< not hashed: moving an entry must not allocate
  std::size_t merge_at_{least_merged};
};

}  // namespace troupe::actors
