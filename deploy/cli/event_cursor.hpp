#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "troupe/actors/cluster_messages.hpp"

namespace troupe::deploy::cli {

/// The position of a reader of a cluster's events: what to ask for next and what is new in an
/// answer, even if the supervisor was restarted meanwhile. A plain class.
class event_cursor {
 public:
  /// Begins after the event of that number; 0: with the oldest kept event.
  explicit event_cursor(std::uint64_t since) : known_{since} {}

  struct news {
    /// The supervisor is another one than before, or has not reached the event of that number: its
    /// events start over with the next answer.
    bool restarted{false};
    std::uint64_t missed{0};  ///< number of events dropped before `events`
    std::vector<actors::cluster_event> events;
    bool more{false};  ///< ask again at once
  };

  [[nodiscard]] actors::event_query next() const { return {known_, 0}; }
  [[nodiscard]] news take(actors::event_page page);

 private:
  std::uint64_t known_;
  std::optional<std::uint64_t> incarnation_;
};

}  // namespace troupe::deploy::cli
