#pragma once

/// Carries requests of a frontend to their one outcome, whatever dies meanwhile: places each
/// request, calls the engines of both sides, and retries on other nodes when nodes are lost.
///
///     request_carrier carrier{*client};
///     carried_request what;
///     what.request = "r7";
///     what.from = "prefill";
///     what.to = "decode";
///     what.prefill = [&](const carried_attempt& now, const node_info& node) { return call_request{...}; };
///     what.decode = ...
///     auto done = carrier.carry(what);  // the decode engine's answer, or why there is none
///
/// What it does when something is lost:
///
///   lost           source kept?  what is started again
///   -------------  ------------  ---------------------------------------------------------
///   decode node    yes           decode, elsewhere, from the existing cache: no second prefill
///   decode node    no            both, under a new id of the source
///   prefill node   -             both; the decode replica stays the same while it is up. Nothing
///                                if decode has received everything already
///   both           -             both
///   call           -             the call of prefill, while its node is up: it may not have been read
///   supervisor     -             nothing; a request that has to be placed waits until it is back
///
/// Each time counts against `limits.retry_budget`, which the supervisor keeps.

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <stop_token>
#include <string>
#include <vector>

#include "troupe/actors/cluster_client.hpp"
#include "troupe/actors/cluster_messages.hpp"
#include "troupe/kvcache/result.hpp"

namespace troupe::actors {

/// Where a request is now.
struct carried_attempt {
  placement where;
  /// The id that both engines must use for the request: `send_spec::request` and
  /// `receive_spec::request`. It consists of the request's own id, a tag of this carry and the
  /// number of the prefill, as in "r7#0123abcd.1", so that no remains of an earlier attempt collide
  /// with it.
  std::string source;
  std::chrono::milliseconds left{0};  ///< of the request's deadline
};

/// Makes the call for the engine at `node`. Its `timeout_ms` is set to the time left.
using carried_call = std::function<call_request(const carried_attempt& now, const node_info& node)>;

struct carried_request {
  std::string request;  ///< 1 to 240 bytes; may be used again
  std::string from, to, affinity;
  std::chrono::milliseconds deadline{30'000};
  /// The deployment's `limits.retry_window` is not 0: a source outlives its decode side.
  bool source_is_kept{false};
  /// Called for every rank, on the thread that carries; must not block. `receive_spec::placed_by`
  /// and `placed_at` come from `where`. A prefill engine may be called again with the same source
  /// if the connection broke under the first call: if it has the source, it answers
  /// `already_exists`, as `send` does.
  carried_call prefill, decode;
  /// Aborts an earlier call. Its answer is neither waited for nor used. Empty: the losing side is
  /// left to end by itself.
  carried_call abort;
  std::stop_token stop{};  ///< once requested, the outcome is `aborted`
};

struct carried_outcome {
  placement where;  ///< of the last attempt
  /// Answers in rank order. A prefill answer is empty if its node was lost after decode had all it
  /// needed.
  std::vector<std::vector<std::uint8_t>> prefill, decode;
  std::uint32_t attempts{0};
  std::uint32_t prefills{0};  ///< how often prefill was computed
};

/// Thread-safe; requests of different threads are carried concurrently.
class request_carrier {
 public:
  /// The client must outlive it.
  explicit request_carrier(cluster_client& client);
  /// Waits until the engines were told of everything given up, as far as they answer in time.
  ~request_carrier();
  request_carrier(const request_carrier&) = delete;
  request_carrier& operator=(const request_carrier&) = delete;

  /// Returns the one outcome, at the deadline at the latest, and after the supervisor was told (or
  /// will be) that the request is over. Errors: the engines' own; `deadline`; `peer_lost` with the
  /// last loss when the budget is used up; `aborted`; `invalid_config`.
  [[nodiscard]] result<carried_outcome> carry(const carried_request& what);

 private:
  struct helpers;

  cluster_client& client_;
  std::unique_ptr<helpers> helpers_;
};

}  // namespace troupe::actors
