#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "troupe/kvcache/result.hpp"
#include "troupe/transport/tcp/socket.hpp"

namespace troupe::actors {

using transport::tcp::socket_address;

/// All addresses of host:port, for a numeric host (10.0.0.2, ::1). Needs no resolver and never
/// blocks.
[[nodiscard]] result<std::vector<socket_address>> addresses_of_number(const std::string& host,
                                                                      std::uint16_t port);
/// Asks the system's resolver, and waits as long as it takes. An empty host means all interfaces.
/// `peer_unreachable`.
[[nodiscard]] result<std::vector<socket_address>> addresses_of(const std::string& host,
                                                               std::uint16_t port);

/// Looks names up on its own threads, so that a silent resolver holds up only the callers that wait
/// for it. Up to four threads, started on demand, one lookup each.
class door_resolver {
 public:
  using answer = std::function<void(result<std::vector<socket_address>>)>;

  using lookup =
      std::function<result<std::vector<socket_address>>(const std::string&, std::uint16_t)>;

  explicit door_resolver(lookup how = addresses_of);
  door_resolver(const door_resolver&) = delete;
  door_resolver& operator=(const door_resolver&) = delete;
  /// No answer is given after this returns. Waits for no lookup: a running one ends on its own and
  /// holds only the state shared with the other threads.
  ~door_resolver();

  /// `then` is called on one of the resolver's threads, but is dropped if `until` passes before the
  /// lookup begins. `then` must not block. Thread-safe. `overloaded` if 256 lookups wait already,
  /// or no thread can be started.
  [[nodiscard]] result<void> look_up(std::string host, std::uint16_t port,
                                     std::chrono::steady_clock::time_point until, answer then);

 private:
  struct question {
    std::string host;
    std::uint16_t port;
    std::chrono::steady_clock::time_point until;
    answer then;
  };
  struct shared {
    lookup how;
    std::mutex mutex;  ///< guards the members below; held while an answer is given
    std::condition_variable changed;
    std::deque<question> waiting;
    std::size_t threads{0}, idle{0};
    bool ended{false};
  };
  static void serve(const std::shared_ptr<shared>& all);

  std::shared_ptr<shared> all_;
};

}  // namespace troupe::actors
