#pragma once

/// The stream with which CAF uses a socket that the door made.

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include <caf/actor_system.hpp>
#include <caf/io/scribe.hpp>

#include "troupe/actors/door/door.hpp"
#include "troupe/transport/owned_fd.hpp"

namespace troupe::actors {

/// The sockets in CAF's use. Thread-safe.
class open_streams : public std::enable_shared_from_this<open_streams> {
 public:
  enum class side : std::uint8_t { dialled, admitted };
  /// Makes a stream for CAF's own broker; the stream owns the connected socket from here on.
  [[nodiscard]] caf::io::scribe_ptr open(caf::actor_system& system, transport::owned_fd socket,
                                         side ours);
  /// Cuts all streams, present and future ones: messages that CAF still has for a peer that takes
  /// nothing more would keep its system from ending.
  void cut();

 private:
  class stream;
  void add(door_socket socket, stream* of);
  void remove(door_socket socket);
  /// For the thread of CAF's loop, which alone ends streams. Null if there is none.
  [[nodiscard]] stream* find(door_socket socket);

  std::mutex mutex_;
  std::map<door_socket, stream*> streams_;
  bool cut_{false};
};

}  // namespace troupe::actors
