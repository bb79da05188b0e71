#pragma once

/// How a process that is started for a stage becomes one of its nodes: the supervisor says which.
///
///     auto slot = claimed_slot::claim(deployment, "decode", {});
///     if (!slot) return slot.error();
///     auto node = start_claimed(deployment, **slot);  // of engine.hpp
///     // ... once `wait_registered` says so:
///     slot->reset();

#include <chrono>
#include <cstdint>
#include <memory>
#include <stop_token>
#include <string>

#include "troupe/config/deployment.hpp"
#include "troupe/kvcache/result.hpp"

namespace troupe::actors {

struct claim_options {
  /// How long it asks where no supervisor is there, or no name is free. Negative: without an end.
  std::chrono::milliseconds limit{-1};
  /// Ends it (`aborted`): at once while it waits or looks for a supervisor, and when a question that is
  /// under way is over.
  std::stop_token given_up{};
};

/// A name that this process has claimed. It is held for it as long as the object lives, by a thread of
/// its own that asks again and again: a cache of hundreds of GiB may take a while to allocate.
class claimed_slot {
 public:
  /// Asks the deployment's supervisor, at once and then after 50 ms, twice as long each time up to the
  /// heartbeat interval, which is logged. Errors: `not_found` (no such stage), `invalid_config` (no host
  /// of it is this one, another cluster's supervisor), `version_mismatch`, `peer_unreachable` (a host is
  /// `auto`, and no route leads to the supervisor); at the limit `deadline` with the last reason;
  /// `aborted` (`given_up` said so). With `supervisor.begin` it begins one where none lives, and fails with
  /// `not_found` where there is no `troupe` command to begin it with.
  [[nodiscard]] static result<std::unique_ptr<claimed_slot>> claim(
      const config::deployment& deployment, const std::string& stage, const claim_options& options);
  /// Holds it no more. A node that was taken in under the name needs that no longer.
  virtual ~claimed_slot() = default;

  [[nodiscard]] virtual const std::string& name() const noexcept = 0;
  /// That the node has to register with.
  [[nodiscard]] virtual std::uint64_t incarnation() const noexcept = 0;
};

}  // namespace troupe::actors
