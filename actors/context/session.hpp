#pragma once

#include <memory>
#include <utility>

#include "troupe/actors/base/clock.hpp"
#include "troupe/actors/messages/messages.hpp"

namespace troupe::actors {

/// What a session needs of the world around it. Its actor serves it with CAF; a simulation serves
/// it with virtual time. No call waits, and none calls the session back before it returns.
class session_surroundings {
 public:
  session_surroundings() = default;
  session_surroundings(const session_surroundings&) = delete;
  session_surroundings& operator=(const session_surroundings&) = delete;
  virtual ~session_surroundings() = default;

  [[nodiscard]] virtual time_point now() const = 0;
  /// The actor that the link knows the session by.
  [[nodiscard]] virtual session_actor this_session() const = 0;
  /// To the link of the session.
  virtual void tell_link(link_command order) = 0;
  virtual void tell_runner(runner_event event) = 0;
  virtual void tell_pool(pool_command order) = 0;
  /// Comes back to `session::handle`, behind what is on its way already.
  virtual void tell_itself(session_event event) = 0;
  /// Called with the last message to the runner: `handle` is not called any more.
  virtual void finish() = 0;
};

/// What works for one side of a transfer, for one keyed value (asked of a peer, or served to one), or
/// for one word to a source. It is told of events one at a time, and asks its surroundings for what
/// it needs.
class session {
 public:
  session() = default;
  session(const session&) = delete;
  session& operator=(const session&) = delete;
  virtual ~session() = default;

  /// Called once, before `handle`. The surroundings outlive the session.
  virtual void begin(session_surroundings& around) = 0;
  virtual void handle(session_event& event) = 0;
  [[nodiscard]] virtual const char* name() const = 0;
  /// What bytes on their way for the session may still touch, other than blocks. The runner keeps it
  /// until the session's last message, so that it outlives a session whose actor crashed.
  [[nodiscard]] virtual std::shared_ptr<const void> touched() const { return {}; }
};

/// Sends an order to a session's link, stamped with the epoch that the session knows.
template <class Order>
void ask_link(session_surroundings& around, const link_handle& link, Order order) {
  if constexpr (requires { order.epoch; }) order.epoch = link.epoch;
  around.tell_link(link_command{std::move(order)});
}

}  // namespace troupe::actors
