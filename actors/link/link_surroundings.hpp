#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <variant>

#include "troupe/actors/base/clock.hpp"
#include "troupe/actors/messages/messages.hpp"

namespace troupe::actors::links {

/// The peer's end of a link, as the surroundings number it. The number of an end that was monitored
/// is never used again. 0: none.
struct far_end {
  std::uint64_t number{0};

  explicit operator bool() const noexcept { return number != 0; }
  friend bool operator==(far_end, far_end) = default;
};

/// Why no answer came.
struct no_answer {
  bool late{false};  ///< the time was over; else nobody will ever answer
  std::string why;
};

using link_answer = std::variant<link_reply, no_answer>;

/// What a link needs of the world around it: a clock, timers, messages. The link actor serves it
/// with CAF; a simulation serves it with virtual time and a network that loses what it likes. No
/// call waits, and none calls the link back before it returns.
class link_surroundings {
 public:
  link_surroundings() = default;
  link_surroundings(const link_surroundings&) = delete;
  link_surroundings& operator=(const link_surroundings&) = delete;
  virtual ~link_surroundings() = default;

  [[nodiscard]] virtual time_point now() const = 0;
  /// Passes the order to `peer_link::handle` after the pause.
  virtual void later(std::chrono::nanoseconds pause, link_command order) = 0;
  /// Called when the link has ended and its last session has detached.
  virtual void finish() = 0;

  // -- this process

  /// The actor that others of this process know the link by.
  [[nodiscard]] virtual link_actor this_end() const = 0;
  /// The id of that actor.
  [[nodiscard]] virtual std::uint64_t id() const = 0;
  virtual void tell_runner(runner_event event) = 0;
  virtual void tell_session(transfer_id transfer, const session_actor& session,
                            session_event event) = 0;
  /// A function that brings what a transport link reports to `peer_link::handle`, in order. Any
  /// thread may call it, at any time.
  [[nodiscard]] virtual std::function<void(link_event)> reporter() = 0;
  /// Reads what has arrived over the transport link, in at most `polls` polls.
  virtual void read(transport::link& from, std::size_t polls) = 0;

  // -- the peer

  /// Connects to the peer's node; ends as `peer_link::on_node_reached`.
  virtual void reach_node() = 0;
  /// Asks the node that was reached to make the other end of this link.
  virtual void ask_node(link_request request, std::function<void(const link_answer&)> then) = 0;
  virtual void ask_end(far_end end, link_request request,
                       std::function<void(const link_answer&)> then) = 0;
  virtual void notify(far_end end, link_notice notice) = 0;
  /// Calls `then` when the other end has taken the notice, has ended, or `patience` is over.
  virtual void notify_and_wait(far_end end, link_notice notice, std::chrono::milliseconds patience,
                               std::function<void()> then) = 0;
  /// Calls `then` if the process of the other end answers.
  virtual void ask_whether_alive(far_end end, std::function<void()> then) = 0;
  /// The end that sent the message which is being handled (a request, a notice, the node's answer);
  /// none if it has no sender.
  [[nodiscard]] virtual far_end sender() = 0;
  /// From now on the death of that end, the latest that `sender` returned, is told by
  /// `peer_link::on_end_down`.
  virtual void monitor(far_end end) = 0;
  virtual void stop_monitoring(far_end end) = 0;
};

}  // namespace troupe::actors::links
