#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>

#include "troupe/actors/engine.hpp"
#include "troupe/actors/leased_name.hpp"
#include "troupe/config/deployment.hpp"
#include "troupe/kvcache/layout.hpp"
#include "troupe/kvcache/result.hpp"

/// A complete inference engine on top of `troupe::engine`, small enough to be read in one go, as a
/// model for the integration of other engines. `troupe node` also runs it for stages with `engine:
/// reference`.
///
///     calls of frontends ->  inbox  -> one worker thread -> transformer (compute)
///     events of Troupe   -> event_fd ->      |           -> troupe::engine (send, receive, ...)
///
/// One thread owns all requests, so nothing needs a lock: it takes calls and events, and between
/// them computes a chunk of each prompt or a token of each text. The two roles are in
/// prefill_worker.cpp and decode_worker.cpp, the calls in calls.hpp.
namespace troupe::reference {

struct reference_options {
  std::uint64_t model_seed{1};  ///< of the weights; equal in all processes of a deployment
  /// Instead of the deployment's model and pool: a cache of the engine's own in this arrangement.
  std::optional<kvcache::cache_layout> layout;
  /// The claim of the node that is started, only used during the start. Null: the node was not
  /// claimed.
  const actors::leased_name* claim{nullptr};
};

/// Thread-safe.
class reference_engine {
 public:
  /// Starts node `name`, which must have the role prefill or decode. Errors of `engine::start`, and
  /// `invalid_config` for another role or a model that this engine cannot run.
  [[nodiscard]] static result<std::unique_ptr<reference_engine>> start(
      const config::deployment& deployment, std::string_view name, reference_options options = {});
  virtual ~reference_engine() = default;

  /// Ends every request with `aborted`, leaves the cluster and waits for the thread. Idempotent.
  virtual void stop() = 0;
  /// The underlying node, for its report and to wait for its registration.
  [[nodiscard]] virtual troupe::engine& node() = 0;
};

}  // namespace troupe::reference
