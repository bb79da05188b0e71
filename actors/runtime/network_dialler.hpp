#pragma once

/// The actor behind `network_actor`; `network.hpp` has its interface.

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <set>
#include <string>
#include <thread>
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

/// Sends a message that somebody waits for. Retries if there is no memory for it.
template <class Send>
void send_with_patience(Send&& send) noexcept {
  for (int tries = 0; tries < 10; ++tries) {
    try {
      send();
      return;
    } catch (const std::bad_alloc&) {
      std::this_thread::sleep_for(std::chrono::milliseconds{10});
    }
  }
}

/// Begins to connect. Unless an error is returned, the outcome comes as a `dialled` with that
/// attempt's number.
using dial_function = std::function<std::optional<troupe::error>(
    std::uint64_t attempt, const std::string& host, std::uint16_t port,
    std::chrono::steady_clock::time_point deadline)>;

/// All askers for an address share one attempt, and each has a deadline of its own:
///
///     asked -> dialling -> greeting (CAF's handshake) -> known, until its actor ends
///
/// An attempt that ended by its own deadline is repeated for askers that can still wait. So is, a
/// few times and after a pause, an attempt whose peer hung up before its door had opened: the door
/// may be crowded. A new asker ends the pause, and has as many attempts as the first.
struct dialler_state {
  using endpoint = std::pair<std::string, std::uint16_t>;
  using promise = caf::typed_response_promise<reached>;

  /// Answers with an error if it is dropped: memory was short, or the actor ended by an exception.
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
  /// The pause before an attempt is made again.
  struct rest {
    std::chrono::steady_clock::time_point until;
    troupe::error why;  ///< the error for askers whose deadline comes before
  };
  struct attempt {
    endpoint to;
    std::chrono::steady_clock::time_point deadline;
    std::vector<asker> askers;
    std::chrono::milliseconds pause{0};  ///< before this attempt; 0: none
    std::optional<rest> rests;           ///< set while the attempt pauses
    /// A duplicate of its socket's descriptor during CAF's handshake: cuts the connection without
    /// knowing whether CAF still has its own descriptor.
    std::shared_ptr<const transport::owned_fd> line;
  };
  struct known_actor {
    caf::strong_actor_ptr actor;
    std::set<std::string> messages;
  };

  dial_function dial;
  caf::actor broker;  ///< CAF's own broker, which speaks over connections; null: it has ended
  std::shared_ptr<open_streams> streams;
  std::map<std::uint64_t, attempt> attempts;
  std::map<endpoint, known_actor> known;
  std::uint64_t last_attempt{0};
};

[[nodiscard]] network_actor::behavior_type network_dialler(
    network_actor::stateful_pointer<dialler_state> self, caf::actor broker,
    std::shared_ptr<open_streams> streams, dial_function dial);

}  // namespace troupe::actors
