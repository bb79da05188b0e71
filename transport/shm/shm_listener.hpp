#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "troupe/transport/backend_context.hpp"
#include "troupe/transport/owned_fd.hpp"
#include "troupe/transport/progress_engine.hpp"
#include "troupe/transport/shm/wire.hpp"

namespace troupe::transport::shm {

/// A connection from our uid that presented one of our tokens.
struct dial_in {
  owned_fd socket;
  hello_message hello;
  peer_credentials from;
};

/// A link that waits for its peer to dial.
class dial_in_target {
 public:
  virtual ~dial_in_target() = default;
  virtual void accept(dial_in caller) = 0;
};

/// The one listening socket of a node's `shm` backend, on an unguessable abstract name, and the
/// connections that have not said hello yet. Connections from another uid are closed at once. The
/// oldest silent connection makes room for the newest, and each lives at most `hello_timeout`.
/// Thread-safe.
class shm_listener final : public pollable, public std::enable_shared_from_this<shm_listener> {
 public:
  static constexpr std::chrono::milliseconds hello_timeout{2000};

  /// `backend_unavailable`.
  [[nodiscard]] static result<std::shared_ptr<shm_listener>> start(const backend_context& context);
  /// Unregisters from the engine; accepts no connection afterwards.
  void stop();

  [[nodiscard]] const std::string& address() const noexcept { return address_; }
  void expect(const token& secret, std::weak_ptr<dial_in_target> target);
  void forget(const token& secret);

  bool on_ready(std::uint64_t key, std::uint32_t events) override;
  void on_timer(std::uint64_t key, steady_time now) override;

 private:
  struct stranger {
    owned_fd socket;
    watch_id watch;
    steady_time until;
    peer_credentials from;
  };

  shm_listener(const backend_context& context, owned_fd socket, std::string address);
  void take_connections();
  /// Takes a connection for which there was no descriptor, by giving up `spare_`. Returns it if a
  /// new spare can be opened; else closes it and returns none.
  owned_fd take_without_descriptors();
  /// Returns whether the connection is no longer a stranger: it sent a message (right or wrong) or
  /// went away.
  bool hear(owned_fd& socket, const peer_credentials& from);
  void drop(std::map<std::uint64_t, stranger>::iterator which);
  /// Reports at most one sentence a second, with the number of suppressed ones.
  void notice(const std::string& what);

  progress_engine& engine_;
  const std::function<void(const std::string&)> notice_;
  const std::uint32_t uid_;
  const std::size_t max_pending_;
  const owned_fd socket_;
  const std::string address_;
  owned_fd spare_;  ///< given up to take a connection when descriptors run out
  watch_id watch_;

  std::mutex mutex_;
  bool stopped_{false};
  bool timer_set_{false};
  std::map<token, std::weak_ptr<dial_in_target>> expected_;
  std::map<std::uint64_t, stranger> strangers_;  ///< by age
  std::uint64_t last_stranger_{0};
  steady_time last_notice_{};
  std::uint64_t unnoticed_{0};
};

}  // namespace troupe::transport::shm
