#pragma once

#include <cstddef>
#include <list>
#include <unordered_map>

#include "troupe/actors/engine_types.hpp"

namespace troupe::actors {

struct waiting_event {
  event what;
  bool last{false};  ///< of its operation
};

/// Events that the engine has not taken, oldest first. The events of one operation are found
/// without scanning those of others. Layer events of one operation merge while they wait.
class waiting_events {
 public:
  /// Returns whether the number of waiting events grew; otherwise the event was merged into the
  /// newest one of its operation.
  bool push(waiting_event e);
  /// Removes the oldest event. There must be one.
  [[nodiscard]] waiting_event pop();
  /// Removes all events of the operation. Costs only as many steps as that operation has events.
  [[nodiscard]] waiting_events extract(operation_id operation);
  /// Puts events in front of all others. Their operations must have no events here.
  void put_first(waiting_events events);
  /// Whether the last event of the operation waits.
  [[nodiscard]] bool has_last(operation_id operation) const;
  [[nodiscard]] bool empty() const noexcept { return events_.empty(); }
  [[nodiscard]] std::size_t size() const noexcept { return events_.size(); }

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

  /// Merging starts at this size: an engine that takes its events has fewer.
  static constexpr std::size_t least_merged = 1024;

  std::list<link> events_;
  std::unordered_map<operation_id, chain> chains_;
  std::size_t merge_at_{least_merged};
};

}  // namespace troupe::actors
