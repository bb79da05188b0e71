#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "troupe/actors/door/door_greeting.hpp"
#include "troupe/actors/door/door_resolver.hpp"

namespace troupe::actors {

/// Opens one connection: looks the host up, tries its addresses in turn, greets. Lives on the
/// loop's thread.
class door_dial : public std::enable_shared_from_this<door_dial> {
 public:
  using clock = door_loop::clock;
  using outcome = std::function<void(result<proven_connection>)>;

  door_dial(door_loop& loop, std::string host, std::uint16_t port, clock::time_point until,
            std::shared_ptr<const door_credentials> credentials);
  door_dial(const door_dial&) = delete;
  door_dial& operator=(const door_dial&) = delete;
  ~door_dial() = default;

  /// `then` is called once, possibly before this returns. Its error names host and port.
  void begin(door_resolver& resolver, outcome then);
  /// Ends as `aborted`.
  void abort();
  /// Ends with error `why`, unless it has ended.
  void give_up(troupe::error why);

 private:
  void on_addresses(result<std::vector<socket_address>> found);
  /// Tries the next address. With none left, ends with the last address's error.
  void try_next();
  void on_connected();
  void refused(troupe::error why);
  void greet();
  void finish(result<proven_connection> how);
  void stop_waiting();

  door_loop& loop_;
  const std::string host_;
  const std::uint16_t port_;
  const clock::time_point until_;
  std::shared_ptr<const door_credentials> credentials_;
  outcome then_;
  std::vector<socket_address> addresses_;
  std::size_t next_{0};
  troupe::error last_;
  owned_fd fd_;
  door_loop::id watch_{0};
  door_loop::id timer_{0};
  std::shared_ptr<door_greeting> greeting_;
};

}  // namespace troupe::actors
