#pragma once

/// CAF's network layer without sockets of its own: the door (`door.hpp`) listens and connects, and
/// hands only authenticated connections to CAF, which speaks over them as over its own.

#include <chrono>
#include <cstdint>
#include <functional>
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

/// The reply of `network_actor` about an address.
struct reached {
  std::optional<troupe::error> failed;
  /// The actor that is published there. Null if it failed.
  caf::strong_actor_ptr actor;
};

/// How an attempt to connect ended; sent by the door's thread to the network actor.
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
    // node, link, host -> network: asks for the actor published at host:port, which has to know
    // these messages. Always answered, by the timeout at the latest. A found actor is remembered
    // while it lives: CAF cannot handle a second connection from here to there.
    caf::replies_to<caf::connect_atom, std::string, std::uint16_t, std::set<std::string>,
                    caf::timespan>::with<reached>,
    // the door -> network
    caf::reacts_to<dialled>,
    // itself: an asker's deadline has come
    caf::reacts_to<tick_atom>>;

/// The network actor of `system`; null before the host has made it, and after its end. Thread-safe.
[[nodiscard]] network_actor network_of(caf::actor_system& system);

/// Calls `then` when the part of CAF crashes that speaks over connections, on that thread: no message
/// reaches another process from then on, nor comes from one.
void on_network_crash(caf::actor_system& system, std::function<void()> then);

/// Asks for the actor at host:port from inside an actor. The reply is a `reached`; leaves no timer
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
  /// If the door cannot be made, every call fails with the reason.
  network(caf::actor_system& system, door_options options);
  ~network();
  network(const network&) = delete;
  network& operator=(const network&) = delete;

  /// Gives `whom` to peers that connect to host:port and authenticate. Returns the port; errors of
  /// `door::listen`.
  [[nodiscard]] result<std::uint16_t> publish(const caf::strong_actor_ptr& whom,
                                              const std::set<std::string>& messages,
                                              const std::string& host, std::uint16_t port);
  /// Stops listening on that port.
  void close(std::uint16_t port);
  /// Hands CAF nothing more, fails every attempt to connect, and drops all actors. Connections
  /// stay. To be called before the system ends; the network is destroyed after it, so that CAF's
  /// last messages still go out.
  void stop();
  /// Ends all connections, present and future ones.
  void cut();
  /// Cuts all connections after `patience`, unless the returned thread is gone before. For the end
  /// of the system, which waits for peers to take their last messages: a frozen peer takes none.
  [[nodiscard]] std::jthread cut_in(std::chrono::milliseconds patience);
  /// All 0 if the door could not be made.
  [[nodiscard]] door::counters count() const;

 private:
  class gate;
  caf::actor_system* system_;
  std::shared_ptr<gate> gate_;
};

}  // namespace troupe::actors
