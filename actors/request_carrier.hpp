#pragma once

/// Carries requests of a frontend to their one outcome, whatever dies meanwhile: places each, calls the
/// engines of both sides, and goes on elsewhere where nodes are lost to it.
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
///   decode node    yes           decode, elsewhere, from the cache that is there: no second prefill
///   decode node    no            both, under a new id of the source
///   prefill node   -             both; the decode replica stays the same while it is up. Not at all
///                                where decode has got everything already
///   both           -             both
///   call           -             the call of prefill, while its node is up: it may not have been read
///   supervisor     -             nothing; a request that has to be placed waits for it to be back
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

/// Where a request is at present.
struct carried_attempt {
  placement where;
  /// What both engines have to call the request: `send_spec::request` and `receive_spec::request`. Its
  /// own id, a tag of this carry and the number of the prefill, as "r7#0123abcd.1", so that nothing left
  /// of one before is in its way.
  std::string source;
  std::chrono::milliseconds left{0};  ///< of the request's deadline
};

/// What an engine at `node` is called with. Its `timeout_ms` is set to what is left.
using carried_call = std::function<call_request(const carried_attempt& now, const node_info& node)>;

struct carried_request {
  std::string request;  ///< 1 to 240 bytes; may be used again
  std::string from, to, affinity;
  std::chrono::milliseconds deadline{30'000};
  /// The deployment's `limits.retry_window` is not 0: a prefill side outlives its decode side.
  bool source_is_kept{false};
  /// Of every rank. Called on the thread that carries; must not block. `receive_spec::placed_by` and
  /// `placed_at` come from `where`. A prefill engine may be called again with the same source, when the
  /// connection broke under the first call: if it has that, it answers `already_exists`, as `send` does.
  carried_call prefill, decode;
  /// Gives up what was called before: not waited for, and its answer is ignored. Empty: the
  /// losing side is left to end by itself.
  carried_call abort;
  std::stop_token stop{};  ///< requested: the outcome is `aborted`
};

struct carried_outcome {
  placement where;  ///< of the last attempt
  /// Answers in rank order. One of prefill is empty when it was lost, and decode had all it needed.
  std::vector<std::vector<std::uint8_t>> prefill, decode;
  std::uint32_t attempts{0};
  std::uint32_t prefills{0};  ///< how often it was computed
};

/// Thread-safe; requests of different threads are carried side by side.
class request_carrier {
 public:
  /// The client must outlive it.
  explicit request_carrier(cluster_client& client);
  /// Waits until the engines were told what was given up, as far as they answer that in time.
  ~request_carrier();
  request_carrier(const request_carrier&) = delete;
  request_carrier& operator=(const request_carrier&) = delete;

  /// Returns with the one outcome, at the deadline at the latest, and after the supervisor was told (or
  /// will be) that the request is over. Errors: the engines' own; `deadline`; `peer_lost` when the
  /// budget is used up, with the last loss; `aborted`; `invalid_config`.
  [[nodiscard]] result<carried_outcome> carry(const carried_request& what);

 private:
  struct helpers;

  cluster_client& client_;
  std::unique_ptr<helpers> helpers_;
};

}  // namespace troupe::actors
