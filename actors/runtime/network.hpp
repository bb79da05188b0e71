#pragma once

/// CAF's network layer without sockets of its own: who listens and who connects is the door
/// (`door.hpp`), and only a connection that proved itself is handed to CAF, which speaks over it as
/// it would over one that it had made itself.

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>

#include <caf/actor_system.hpp>
#include <caf/allowed_unsafe_message_type.hpp>
#include <caf/atom.hpp>
#include <caf/replies_to.hpp>
#include <caf/timespan.hpp>
#include <caf/typed_actor.hpp>

#include "troupe/actors/door/door.hpp"
#include "troupe/actors/messages/types.hpp"
#include "troupe/kvcache/result.hpp"
#include "troupe/transport/owned_fd.hpp"

namespace troupe::actors {

/// What `network_actor` says of an address.
struct reached {
  std::optional<troupe::error> failed;
  /// The actor that is published there. Null when it failed.
  caf::strong_actor_ptr actor;
};

/// How an attempt of the network actor's to connect ended, from the door's thread.
struct dialled {
  std::uint64_t attempt{0};
  std::optional<troupe::error> failed;
  std::shared_ptr<const transport::owned_fd>
      socket;  ///< unless it failed; closed with its last owner
};

}  // namespace troupe::actors

CAF_ALLOW_UNSAFE_MESSAGE_TYPE(troupe::actors::reached)
CAF_ALLOW_UNSAFE_MESSAGE_TYPE(troupe::actors::dialled)

namespace troupe::actors {

/// Connects to published actors. One per actor system, never blocks.
using network_actor = caf::typed_actor<
    // node, link, host -> network: the actor published at host:port, which shall know these messages.
    // Always answered, by the timeout at the latest. An actor that was found is remembered while it
    // lives: CAF bears no second connection from here to there.
    caf::replies_to<caf::connect_atom, std::string, std::uint16_t, std::set<std::string>,
                    caf::timespan>::with<reached>,
    // the door -> network
    caf::reacts_to<dialled>,
    // itself: the deadline of somebody has come
    caf::reacts_to<tick_atom>>;

/// The one of `system`; null before the host made it, and after its end. Thread-safe.
[[nodiscard]] network_actor network_of(caf::actor_system& system);

/// Asks for the actor at host:port from inside an actor. The reply is a `reached`; no timer is left
/// behind.
template <class Handle, class Self>
auto reach(Self* self, const std::string& host, std::uint16_t port,
           std::chrono::milliseconds timeout) {
  auto& system = self->system();
  return self->request(network_of(system), caf::infinite, caf::connect_atom::value, host, port,
                       system.template message_types<Handle>(), caf::timespan{timeout});
}

/// The door of an actor system. Owned by the host; thread-safe but for `stop` and the destructor.
class network {
 public:
  /// Every call fails with why the door could not be made, if it could not.
  network(caf::actor_system& system, door_options options);
  ~network();
  network(const network&) = delete;
  network& operator=(const network&) = delete;

  /// Whoever connects to host:port and proves itself gets `whom`. Returns the port; errors as
  /// `door::listen` has them.
  [[nodiscard]] result<std::uint16_t> publish(const caf::strong_actor_ptr& whom,
                                              const std::set<std::string>& messages,
                                              const std::string& host, std::uint16_t port);
  /// Listens there no more.
  void close(std::uint16_t port);
  /// Hands CAF nothing more, fails every attempt to connect, and lets go of all actors. Connections
  /// stay. To be called before the system ends; the network is destroyed after it, so that what CAF
  /// says last still goes out.
  void stop();
  /// Ends all connections, and those that are still to come.
  void cut();
  /// Unless what it returns is gone before, cuts all connections then. While the system ends: it
  /// waits for peers to take what they were told last, and a frozen one takes nothing.
  [[nodiscard]] std::jthread cut_in(std::chrono::milliseconds patience);
  /// All 0 when the door could not be made.
  [[nodiscard]] door::counters count() const;

 private:
  class gate;
  caf::actor_system* system_;
  std::shared_ptr<gate> gate_;
};

}  // namespace troupe::actors
