#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "troupe/actors/base/clock.hpp"
#include "troupe/actors/context/session.hpp"
#include "troupe/actors/messages/messages.hpp"

namespace troupe::actors::operations {

/// What the runner needs of the world around it: a clock, chance, the other actors of its node. The
/// runner's actor serves it with CAF; a simulation serves it with virtual time. No call waits, and
/// none calls the runner back before it returns.
class runner_surroundings {
 public:
  runner_surroundings() = default;
  runner_surroundings(const runner_surroundings&) = delete;
  runner_surroundings& operator=(const runner_surroundings&) = delete;
  virtual ~runner_surroundings() = default;

  [[nodiscard]] virtual time_point now() const = 0;
  /// A random number.
  [[nodiscard]] virtual std::uint64_t draw() = 0;
  /// Calls `operation_runner::tick` after the pause.
  virtual void wake_after(std::chrono::nanoseconds pause) = 0;
  /// Comes back to `operation_runner::handle`, behind what is on its way already.
  virtual void tell_itself(runner_event event) = 0;
  /// Does the work on another thread than this one, which may be the engine's, and brings its
  /// result to `operation_runner::handle`.
  virtual void do_elsewhere(std::function<runner_event()> work) = 0;

  // -- the other actors of the node

  /// From here on `need_link` and `tell_pool` reach these.
  virtual void connect(connect_operations& to) = 0;
  virtual void need_link(actors::need_link order) = 0;
  virtual void tell_pool(pool_command order) = 0;
  virtual void tell_link(const link_handle& link, link_command order) = 0;
  /// From here on the end of that link's actor is told by `operation_runner::on_link_ended`.
  virtual void watch_link(const link_handle& link) = 0;

  // -- sessions

  /// Makes an actor for the session, which begins behind what is on its way already. If the actor
  /// crashes, `operation_runner::on_session_crashed` tells of it.
  virtual session_actor begin_session(transfer_id transfer, const link_handle& link,
                                      std::unique_ptr<session> made) = 0;
  /// Same, but it begins on another thread than this one, which may be the engine's: the session
  /// copies much then.
  virtual session_actor begin_session_elsewhere(transfer_id transfer, const link_handle& link,
                                                std::unique_ptr<session> made) = 0;
  virtual void tell_session(transfer_id transfer, const session_actor& to, session_event event) = 0;
};

}  // namespace troupe::actors::operations
