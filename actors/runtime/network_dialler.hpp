#pragma once

/// The actor behind `network_actor`; `network.hpp` has its interface.

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <caf/actor.hpp>
#include <caf/actor_addr.hpp>
#include <caf/stateful_actor.hpp>
#include <caf/typed_event_based_actor.hpp>
#include <caf/typed_response_promise.hpp>

#include "troupe/actors/runtime/network.hpp"
#include "troupe/actors/runtime/network_stream.hpp"

namespace troupe::actors {

/// Begins to connect; the outcome comes as `dialled` with that attempt's number, unless an error is
/// returned.
using dial_function = std::function<std::optional<troupe::error>(
    std::uint64_t attempt, const std::string& host, std::uint16_t port,
    std::chrono::steady_clock::time_point deadline)>;

/// Every asker waits for the one attempt that is made for an address, and has a deadline of its own:
///
///     asked -> dialling -> greeting (CAF's handshake) -> known, until its actor ends
///
/// An attempt that ended by its own deadline is made again for those who can still wait. So is, a few times and after
/// a pause, one that ended because the peer hung up before its door had opened: that may be crowded. Whoever asks
/// meanwhile ends the pause, and has as many attempts as the first.
struct dialler_state {
  using endpoint = std::pair<std::string, std::uint16_t>;
  using promise = caf::typed_response_promise<reached>;

  /// One that is dropped unanswered hears of it: memory was short, or the actor ends by an exception.
  class asker {
   public:
    asker(promise reply, std::set<std::string> knows, std::chrono::milliseconds patience);
    ~asker();
    asker(asker&&) noexcept = default;
    asker& operator=(asker&&) noexcept = default;

    void answer(reached outcome) { reply_.deliver(std::move(outcome)); }

    std::set<std::string> messages;
    std::chrono::milliseconds timeout;
    std::chrono::steady_clock::time_point deadline;

   private:
    promise reply_;
  };
  /// Until an attempt is made again.
  struct rest {
    std::chrono::steady_clock::time_point until;
    troupe::error why;  ///< what those hear whose deadline comes before
  };
  struct attempt {
    endpoint to;
    std::chrono::steady_clock::time_point deadline;
    std::vector<asker> askers;
    std::chrono::milliseconds pause{0};  ///< before it was made again; 0: none
    std::optional<rest> rests;           ///< it does not run
    /// Another descriptor of its socket while CAF's handshake runs: cuts it without knowing whether
    /// CAF still has its own.
    std::shared_ptr<const transport::owned_fd> line;
  };
  struct known_actor {
    caf::strong_actor_ptr actor;
    std::set<std::string> messages;
  };

  dial_function dial;
  caf::actor broker;  ///< CAF's own, that speaks over connections
  std::shared_ptr<open_streams> streams;
  std::map<std::uint64_t, attempt> attempts;
  std::map<endpoint, known_actor> known;
  std::uint64_t last_attempt{0};
};

[[nodiscard]] network_actor::behavior_type network_dialler(
    network_actor::stateful_pointer<dialler_state> self, caf::actor broker,
    std::shared_ptr<open_streams> streams, dial_function dial);

}  // namespace troupe::actors
