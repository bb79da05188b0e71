#pragma once

/// What CAF speaks through over a socket that the door made.

#include <memory>
#include <mutex>
#include <set>

#include <caf/actor_system.hpp>
#include <caf/io/scribe.hpp>

#include "troupe/actors/door.hpp"

namespace troupe::actors {

/// The sockets that CAF has. Thread-safe.
class open_streams : public std::enable_shared_from_this<open_streams> {
 public:
  /// A stream for CAF's own broker, which owns the connected socket from here on.
  [[nodiscard]] caf::io::scribe_ptr open(caf::actor_system& system, door_socket socket);
  /// Nothing comes and nothing leaves any more, over none of them and no later one: what CAF still
  /// has to say to a peer that takes nothing more would keep its system from ending.
  void cut();

 private:
  class stream;
  void add(door_socket socket);
  void remove(door_socket socket);

  std::mutex mutex_;
  std::set<door_socket> sockets_;
  bool cut_{false};
};

}  // namespace troupe::actors
