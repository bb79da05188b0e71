#pragma once

#include <chrono>
#include <thread>

#include <caf/scoped_actor.hpp>
#include <caf/system_messages.hpp>

namespace troupe::testing {

/// Returns whether an actor that `self` monitors ends within `time`. CAF's own `after` uses the
/// wall clock, which may be set meanwhile.
inline bool monitored_ends_within(caf::scoped_actor& self, std::chrono::milliseconds time) {
  const auto end = std::chrono::steady_clock::now() + time;
  while (self->mailbox().empty()) {
    if (std::chrono::steady_clock::now() >= end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds{5});
  }
  bool ended = false;
  self->receive([&](caf::down_msg&) { ended = true; });
  return ended;
}

}  // namespace troupe::testing
