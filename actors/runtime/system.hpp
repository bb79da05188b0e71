#pragma once

/// CAF's actor system as Troupe uses it: types announced, network layer loaded, limits and handlers
/// set. Wraps ports, connections and shutdown so that each call returns a `result` and none can
/// hang.

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include <caf/actor_cast.hpp>
#include <caf/actor_system.hpp>
#include <caf/actor_system_config.hpp>
#include <caf/event_based_actor.hpp>
#include <caf/exit_reason.hpp>
#include <caf/scheduled_actor.hpp>
#include <caf/sec.hpp>
#include <caf/send.hpp>

#include "troupe/actors/actor_host_options.hpp"
#include "troupe/actors/door/door.hpp"
#include "troupe/actors/runtime/caf_thread_scope.hpp"
#include "troupe/kvcache/result.hpp"

namespace troupe::actors {

class network;

/// One per process. Not movable. `publish`, `connect` and `system` may be called from any thread
/// that is not an actor's (they block); `shutdown` and the destructor from one thread only, when
/// the others are done.
class actor_host {
 public:
  explicit actor_host(actor_host_options options = {});
  /// Calls `shutdown`, then ends the actor system.
  ~actor_host();
  actor_host(const actor_host&) = delete;
  actor_host& operator=(const actor_host&) = delete;

  /// A thread that spawns actors in it, or has a `caf::scoped_actor` of it, holds a
  /// `caf_thread_scope` meanwhile.
  [[nodiscard]] caf::actor_system& system() noexcept { return *system_; }
  /// Counts of the connections at this process's door so far.
  [[nodiscard]] door::counters door_counters() const;

  /// Publishes `handle` to peers that connect to host:port. Port 0 asks the OS; returns the port
  /// that was bound. One published actor per process: peers look everything else up through it.
  /// Errors: `already_exists` (port taken), `invalid_config` (not an address of this host, no right
  /// to bind it, or credentials that cannot be used).
  template <class Handle>
  [[nodiscard]] result<std::uint16_t> publish(const Handle& handle, const std::string& host,
                                              std::uint16_t port) {
    return publish_actor(caf::actor_cast<caf::strong_actor_ptr>(handle),
                         system_->message_types<Handle>(), host, port);
  }

  /// The actor published at host:port. Errors: `peer_unreachable` (nothing listens there, no such
  /// host), `deadline` (something listens but does not answer), `unauthorized` (one side's
  /// credentials are of another cluster), `version_mismatch` (an actor with other messages, or not
  /// an actor at all), `invalid_config` (our credentials cannot be used). Never takes much longer
  /// than `timeout`, whatever the peer does.
  template <class Handle>
  [[nodiscard]] result<Handle> connect(const std::string& host, std::uint16_t port,
                                       std::chrono::milliseconds timeout) {
    auto found = connect_actor(system_->message_types<Handle>(), host, port, timeout);
    if (!found) return fail(found.error());
    return caf::actor_cast<Handle>(*found);
  }

  /// Has `shutdown` tell this actor to end. Published actors are told anyway.
  template <class Handle>
  void own(const Handle& handle) {
    owned_.push_back(caf::actor_cast<caf::strong_actor_ptr>(handle));
  }

  /// Closes the ports, tells published and owned actors to end and waits for all actors, at most
  /// `shutdown_timeout`. A second call does nothing. Returns false if some actor had not ended by
  /// then. `meanwhile` is called repeatedly during the wait: a node that polls makes the progress
  /// that its actors wait for.
  bool shutdown(const std::function<void()>& meanwhile = {});

 private:
  [[nodiscard]] result<std::uint16_t> publish_actor(const caf::strong_actor_ptr& whom,
                                                    const std::set<std::string>& messages,
                                                    const std::string& host, std::uint16_t port);
  [[nodiscard]] result<caf::strong_actor_ptr> connect_actor(const std::set<std::string>& messages,
                                                            const std::string& host,
                                                            std::uint16_t port,
                                                            std::chrono::milliseconds timeout);

  struct published {
    caf::strong_actor_ptr actor;
    std::uint16_t port{0};
  };

  actor_host_options options_;
  std::unique_ptr<caf::actor_system_config> config_;
  std::unique_ptr<caf::actor_system> system_;
  std::size_t own_threads_{0};        ///< of CAF's own actors, which end with the system
  std::unique_ptr<network> network_;  ///< outlives the system, to carry its last messages
  std::vector<published> published_;
  std::vector<caf::strong_actor_ptr> owned_;
  std::optional<bool> ended_;
};

/// Writes lines that CAF would print to standard error to `component`'s logger instead: messages
/// that the actor does not know (dropped, at most one line a second), errors sent to it, ends of
/// its actors, and exceptions that escaped a handler (the actor ends, with `internal` in the line).
/// Call it first in the behaviour function; a handler set after it replaces its own.
void set_log_handlers(caf::scheduled_actor& self, std::string component);

/// Passes an answer to the thread that waits for it. The first answer counts. Thread-safe.
template <class Reply>
class answer_board {
 public:
  void put(result<Reply> answer) {
    const std::lock_guard lock{mutex_};
    if (answer_) return;
    answer_.emplace(std::move(answer));
    there_.notify_one();
  }
  /// To be called once; empty if no answer came in time.
  [[nodiscard]] std::optional<result<Reply>> take(std::chrono::milliseconds within) {
    std::unique_lock lock{mutex_};
    there_.wait_for(lock, within, [this] { return answer_.has_value(); });
    return std::move(answer_);
  }

 private:
  std::mutex mutex_;
  std::condition_variable there_;
  std::optional<result<Reply>> answer_;
};

/// How long to wait for an answer.
struct answer_wait {
  // NOLINTNEXTLINE(google-explicit-constructor): most waits are a time alone
  template <class Count, class Period>
  answer_wait(std::chrono::duration<Count, Period> most, std::stop_token until = {})
      : timeout{most}, given_up{std::move(until)} {}

  std::chrono::milliseconds timeout;
  std::stop_token given_up;  ///< once requested, the answer is not wanted any more
};

/// Asks an actor from a thread that may block, and waits for the reply. `who` names the other side
/// in messages. Errors: `peer_lost` (it ended or its connection broke, noticed at once), `deadline`
/// (no answer), `aborted` (the wait was given up), `internal` (it answered with an error of CAF's).
/// Leaves no timer behind, so it may be called at any rate. Not for use inside an actor.
template <class Reply, class Handle, class... Args>
[[nodiscard]] result<Reply> ask(caf::actor_system& system, const Handle& whom,
                                const std::string& who, const answer_wait& bounds, Args... args) {
  const auto not_wanted = [&] {
    return fail(errc::aborted, who + " was not asked: nobody waits for its answer any more");
  };
  if (bounds.given_up.stop_requested()) return not_wanted();
  const auto board = std::make_shared<answer_board<Reply>>();
  // The peer is an argument, not a capture: for an actor without arguments CAF reads them through a
  // null pointer, which is undefined.
  const auto body = [=, until = bounds.given_up](caf::event_based_actor* self, const Handle& peer) {
    // The wait may have been given up by now, and its caller have gone on.
    if (until.stop_requested()) {
      self->quit();
      return;
    }
    // A peer keeps every monitor for as long as it lives, so remove ours.
    const auto end = [=] {
      self->demonitor(peer.address());
      self->quit();
    };
    self->set_exit_handler([=](caf::exit_msg&) { end(); });
    self->set_down_handler([=](caf::down_msg& down) {
      board->put(fail(errc::peer_lost, who + " was lost: " + self->system().render(down.reason) +
                                           "; is its process still running?"));
      end();
    });
    self->monitor(peer);
    self->request(peer, caf::infinite, args...)
        .then(
            [=](Reply& reply) {
              board->put(std::move(reply));
              end();
            },
            [=](caf::error& e) {
              // An actor that ended returns its unread messages before it notifies its monitors.
              const bool ended = e == caf::sec::request_receiver_down;
              board->put(ended
                             ? fail(errc::peer_lost, who + " was lost: it ended")
                             : fail(errc::internal,
                                    who + " answered with an error: " + self->system().render(e)));
              end();
            });
  };
  const caf_thread_scope visit;
  const auto asker = system.spawn(body, whom);
  const std::stop_callback when_given_up{
      bounds.given_up, [&] {
        board->put(fail(errc::aborted, "the wait for the answer of " + who + " was given up"));
      }};
  auto answer = board->take(bounds.timeout);
  if (!answer || bounds.given_up.stop_requested()) {
    caf::anon_send_exit(asker, caf::exit_reason::user_shutdown);
  }
  if (answer) return std::move(*answer);
  return fail(errc::deadline, who + " did not answer within " +
                                  std::to_string(bounds.timeout.count()) +
                                  " ms; it is overloaded or frozen");
}

/// A fresh incarnation: random, never 0.
[[nodiscard]] std::uint64_t draw_incarnation();

}  // namespace troupe::actors
