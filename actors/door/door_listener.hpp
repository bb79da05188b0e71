#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <unordered_map>

#include "troupe/actors/door/door_eviction.hpp"
#include "troupe/actors/door/door_greeting.hpp"

namespace troupe::actors {

/// The listeners of a door and the strangers at them. Lives on the loop's thread.
class door_listener {
 public:
  struct rules {
    std::chrono::milliseconds patience;
    std::uint32_t max_strangers;
  };
  struct reports {
    std::function<std::shared_ptr<const door_credentials>()> credentials;  ///< the ones in force
    std::function<void(const std::string& sentence)> notice;
    std::function<void()> admitted, refused;
    std::function<void(std::uint32_t)> strangers;  ///< their current number
  };
  using admit_call = std::function<void(proven_connection)>;

  door_listener(door_loop& loop, rules limits, reports tell);
  door_listener(const door_listener&) = delete;
  door_listener& operator=(const door_listener&) = delete;
  ~door_listener() = default;

  /// Adds a listener: `fd` listens on `port`. `already_exists`: another listener has that port;
  /// `overloaded`.
  [[nodiscard]] result<void> open(owned_fd fd, std::uint16_t port, admit_call admitted);
  /// Closes the listener at a port and drops its strangers.
  void close(std::uint16_t port);
  /// Closes all listeners.
  void close();

 private:
  struct stranger {
    std::uint16_t port;
    std::string from, address, network;
    std::shared_ptr<door_greeting> greeting;
  };
  using strangers = std::list<stranger>;  ///< oldest first
  struct listener {
    owned_fd fd;
    std::shared_ptr<const admit_call> admitted;
    door_loop::id watch{0};
    door_loop::id pause{0};
  };

  void accept_some(std::uint16_t port);
  void out_of_descriptors(std::uint16_t port);
  void let_in(std::uint16_t port, owned_fd fd);
  void on_end(strangers::iterator who, const admit_call& admitted, result<proven_connection> how);
  [[nodiscard]] std::uint32_t how_many(bool have_key) const;
  /// Drops one stranger, of those with the key or of those without it (`choose_who_goes`), but none
  /// whose answer has arrived. May end others, which may close listeners.
  void drop_one(bool has_key, const char* why);
  [[nodiscard]] strangers::iterator choose(bool has_key);
  void count();

  door_loop& loop_;
  const rules limits_;
  const reports tell_;
  owned_fd spare_;  ///< released to accept and drop a connection when descriptors run out
  std::unordered_map<std::uint16_t, listener> listeners_;
  strangers strangers_;
  door_offenders offenders_;
};

}  // namespace troupe::actors
