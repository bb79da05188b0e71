#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>

#include "troupe/transport/backend_context.hpp"
#include "troupe/transport/progress_engine.hpp"
#include "troupe/transport/tcp/lane_proof.hpp"
#include "troupe/transport/tcp/socket.hpp"
#include "troupe/transport/tcp/wire.hpp"

namespace troupe::transport::tcp {

/// What a connection has presented: its greeting, the challenge that it got, and the proofs that it
/// showed.
struct lane_claim {
  hello said;
  hello_bytes greeting{};
  reply_bytes challenge{};
  dialers_proofs shown{};
};

/// A link waiting for lanes.
class lane_acceptor {
 public:
  virtual ~lane_acceptor() = default;
  /// Checks the proofs and takes the descriptor, or returns why not.
  [[nodiscard]] virtual std::optional<troupe::error> accept_lane(owned_fd& fd,
                                                                 const lane_claim& claim) = 0;
};

/// The endpoint's only listening socket. It trusts nobody: until a connection has proved that it
/// holds the offers of a waiting link it costs about 300 bytes of memory and one descriptor, for
/// two seconds at most. At most `max_pending_connections` are kept; beyond that, the oldest that
/// has not greeted is dropped first, then the oldest.
class listener final : public pollable, public std::enable_shared_from_this<listener> {
 public:
  [[nodiscard]] static result<std::shared_ptr<listener>> create(backend_context& context);

  [[nodiscard]] std::uint16_t port() const noexcept { return port_; }
  /// As configured: an address or a name.
  [[nodiscard]] const std::string& host() const noexcept { return context_.options.host; }
  /// The numeric address that `host` resolved to, for offers.
  [[nodiscard]] const std::string& address() const noexcept { return address_; }

  void expect(std::uint64_t link, std::weak_ptr<lane_acceptor> who);
  void forget(std::uint64_t link);
  /// Must be called before the endpoint is destroyed.
  void stop();

  bool on_ready(std::uint64_t key, std::uint32_t events) override;
  void on_timer(std::uint64_t key, steady_time now) override;

 private:
  struct stranger {
    std::uint64_t key;
    owned_fd fd;
    watch_id watch;
    steady_time until;
    hello_bytes greeting{};
    std::size_t got{0};           ///< bytes of the greeting, then of the proofs
    std::optional<hello> said{};  ///< set once it has greeted and been challenged
    reply_bytes challenge{};
    proof_bytes shown{};
  };
  using strangers = std::list<stranger>;  // oldest first

  listener(backend_context& context, owned_fd fd);
  bool accept_all();
  /// Accepts or drops a connection when descriptors have run out. Returns none if it was dropped.
  owned_fd take_without_descriptors();
  void admit(owned_fd fd);
  void listen_to(strangers::iterator who);
  void hear_greeting(strangers::iterator who);
  void challenge(strangers::iterator who);
  void judge(strangers::iterator who);
  void refuse(strangers::iterator who, const troupe::error& why);
  void drop(strangers::iterator who);
  void make_room();
  void notice(const std::string& what);

  backend_context& context_;
  progress_engine& engine_;
  const owned_fd fd_;
  const std::uint16_t port_;
  const std::string address_;
  watch_id watch_;

  // Used only in calls from the engine, which never overlap.
  owned_fd spare_;  ///< given up to take and drop a connection when descriptors run out
  strangers strangers_;
  std::unordered_map<std::uint64_t, strangers::iterator> by_key_;
  std::uint64_t last_key_{0};
  bool timer_set_{false};
  steady_time last_notice_{};
  std::uint64_t unsaid_{0};

  std::mutex mutex_;  // guards `waiting_`
  std::unordered_map<std::uint64_t, std::weak_ptr<lane_acceptor>> waiting_;
};

}  // namespace troupe::transport::tcp
