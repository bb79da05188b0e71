#pragma once

/// What happened in a cluster, for people: what the supervisor remembers for `troupe events`. A
/// plain class without threads, I/O or a clock. Nothing is decided by it, and it is gone with the
/// supervisor.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>

#include "troupe/actors/cluster_messages.hpp"

namespace troupe::actors {

/// Events that are kept; older ones are dropped.
inline constexpr std::size_t max_events = 4096;
/// Events, and their bytes, that one answer carries. It has one at least where there is one.
inline constexpr std::size_t max_page_events = 256;
inline constexpr std::size_t max_page_bytes = std::size_t{256} << 10;
/// Bytes of an event's text, and of its other words.
inline constexpr std::size_t max_event_text = 1024;
inline constexpr std::size_t max_event_word = 64;

class event_log {
 public:
  /// Keeps the newest `kept` (at least one).
  explicit event_log(std::size_t kept = max_events);

  /// Gives the event the next sequence number and keeps it, with its texts cut and printable, and
  /// as such it is returned. The reference holds until the next `add`.
  const cluster_event& add(cluster_event event);
  /// The oldest ones that are kept after `query.after`, oldest first; at most `query.max` (0: as
  /// many as an answer carries). When `query.after + 1` is not the first, those between were
  /// dropped. Nothing when `query.after` has not happened yet.
  [[nodiscard]] event_page page(const event_query& query,
                                std::uint64_t supervisor_incarnation) const;
  /// The last sequence number; 0: nothing happened.
  [[nodiscard]] std::uint64_t newest() const noexcept { return newest_; }

 private:
  std::size_t kept_;
  std::uint64_t newest_{0};
  std::deque<cluster_event> events_;
};

/// An event as the supervisor logs it, the same keys in the same order each time; what it has not is
/// `-`, and quotes and backslashes within the reason have a backslash before them:
///
///     event=down node=decode-0 incarnation=59c1a2f0c1d2e3f4 epoch=7 reason="not heard for 5003 ms"
[[nodiscard]] std::string event_line(const cluster_event& event);

}  // namespace troupe::actors
