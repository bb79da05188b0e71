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

/// All addresses of host:port. A number (10.0.0.2, ::1) needs no resolver and never blocks.
[[nodiscard]] result<std::vector<socket_address>> addresses_of_number(const std::string& host,
                                                                      std::uint16_t port);
/// Asks the system's resolver, and waits as long as that takes. An empty host stands for all
/// interfaces. `peer_unreachable`.
[[nodiscard]] result<std::vector<socket_address>> addresses_of(const std::string& host,
                                                               std::uint16_t port);

/// Looks names up on threads of its own, so that a resolver that does not answer holds up nobody but
/// who waits for it: up to four lookups at a time, started when they are needed.
class door_resolver {
 public:
  using answer = std::function<void(result<std::vector<socket_address>>)>;

  using lookup =
      std::function<result<std::vector<socket_address>>(const std::string&, std::uint16_t)>;

  explicit door_resolver(lookup how = addresses_of);
  door_resolver(const door_resolver&) = delete;
  door_resolver& operator=(const door_resolver&) = delete;
  /// No answer is given any more when this returns. Waits for no lookup: one that runs ends on its
  /// own, holding nothing but what it shares with the other threads.
  ~door_resolver();

  /// `then` is called on one of the resolver's threads, unless `until` is past before the lookup
  /// begins: then it is dropped. `then` must not block. Thread-safe. `overloaded` when 256 wait
  /// already, or no thread can be had.
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
    std::mutex mutex;  ///< of what follows; held while an answer is given
    std::condition_variable changed;
    std::deque<question> waiting;
    std::size_t threads{0}, idle{0};
    bool ended{false};
  };
  static void serve(const std::shared_ptr<shared>& all);

  std::shared_ptr<shared> all_;
};

}  // namespace troupe::actors
