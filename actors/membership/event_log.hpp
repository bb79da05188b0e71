#pragma once

/// The events of a cluster that the supervisor keeps for people to read by `troupe events`. A plain
/// class without threads, I/O or a clock. No decision depends on it, and it ends with the
/// supervisor.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>

#include "troupe/actors/cluster_messages.hpp"

namespace troupe::actors {

/// Events that are kept; older ones are dropped.
inline constexpr std::size_t max_events = 4096;
/// The most events, and bytes of events, in one answer. At least one event is sent if there is any.
inline constexpr std::size_t max_page_events = 256;
inline constexpr std::size_t max_page_bytes = std::size_t{256} << 10;
/// The most bytes of an event's text, and of each of its other words.
inline constexpr std::size_t max_event_text = 1024;
inline constexpr std::size_t max_event_word = 64;

class event_log {
 public:
  /// Keeps the newest `kept` (at least one).
  explicit event_log(std::size_t kept = max_events);

  /// Gives the event the next sequence number, cuts its texts and makes them printable, and keeps
  /// it. The returned reference is valid until the next `add`.
  const cluster_event& add(cluster_event event);
  /// The oldest kept events after `query.after`, oldest first; at most `query.max` (0: as many as
  /// an answer carries). If the first one is not `query.after + 1`, the events between were
  /// dropped. Empty if `query.after` has not happened yet.
  [[nodiscard]] event_page page(const event_query& query,
                                std::uint64_t supervisor_incarnation) const;
  /// The last sequence number; 0 if there was no event.
  [[nodiscard]] std::uint64_t newest() const noexcept { return newest_; }

 private:
  std::size_t kept_;
  std::uint64_t newest_{0};
  std::deque<cluster_event> events_;
};

/// An event as the supervisor logs it, with the same keys in the same order each time. A missing
/// field is printed as `-`; quotes and backslashes within the reason are escaped by a backslash:
///
///     event=down node=decode-0 incarnation=59c1a2f0c1d2e3f4 epoch=7 reason="not heard for 5003 ms"
[[nodiscard]] std::string event_line(const cluster_event& event);

}  // namespace troupe::actors
